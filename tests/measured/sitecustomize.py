"""`make coverage` puts this folder on PYTHONPATH: every Python process that a test starts, jobs of the DAG among them,
measures itself as COVERAGE_PROCESS_START says."""

import coverage

coverage.process_startup()
