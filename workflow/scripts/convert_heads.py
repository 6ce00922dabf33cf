from entmtp.stages import heads, run_rule

run_rule(snakemake, heads.convert_heads)  # noqa: F821
