from entmtp.stages import products, run_rule

run_rule(snakemake, products.replay_generation)  # noqa: F821
