from entmtp.stages import products, run_rule

run_rule(snakemake, products.figures)  # noqa: F821
