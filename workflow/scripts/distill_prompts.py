from entmtp.stages import distill, run_rule

run_rule(snakemake, distill.distill_prompts)  # noqa: F821
