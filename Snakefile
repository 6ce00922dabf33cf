# Entry: what a run is made of. Configuration is Hydra's (conf/); `--config experiment=main` picks a run,
# `--config overrides="bank.shortlist=8 plot.dpi=300"` adds Hydra overrides.


include: "workflow/rules/common.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/heads.smk"
include: "workflow/rules/traces.smk"
include: "workflow/rules/trees.smk"
include: "workflow/rules/bench.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/scheduling.smk"
include: "workflow/rules/distill.smk"


localrules:
    all,
    publish,


rule all:
    input:
        products(),
