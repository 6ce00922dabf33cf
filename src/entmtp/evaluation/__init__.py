"""From timed rows and checks to what a reader sees: statistics, summary, tables, figures, report."""
