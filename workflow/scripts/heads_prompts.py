from entmtp.stages import heads, run_rule

run_rule(snakemake, heads.heads_prompts)  # noqa: F821
