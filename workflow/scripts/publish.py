from entmtp.stages import products, run_rule

run_rule(snakemake, products.publish)  # noqa: F821
