from entmtp.stages import products, run_rule

run_rule(snakemake, products.summary)  # noqa: F821
