"""LLM pretraining from one TOML file: models, data, parallelism, trainer, launchers, report."""
