from entmtp.stages import products, run_rule

run_rule(snakemake, products.resolved_config)  # noqa: F821
