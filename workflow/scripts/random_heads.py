from entmtp.stages import heads, run_rule

run_rule(snakemake, heads.random_heads)  # noqa: F821
