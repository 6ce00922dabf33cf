from entmtp.stages import products, run_rule

run_rule(snakemake, products.track_record)  # noqa: F821
