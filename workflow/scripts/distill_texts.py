from entmtp.stages import distill, run_rule

run_rule(snakemake, distill.distill_texts)  # noqa: F821
