"""The pipeline's stages: one function a Snakemake rule, by when it runs."""

from entmtp.stages.common import run_rule

__all__ = ["run_rule"]
