"""Train, load the run, continue a prompt: a whole run from Python, in one process."""

from titan_train import Trainer, load_config, load_run

settings = {"train.steps": 8, "launch.device": "cpu", "metrics.progress": "lines"}
config = load_config("debug", **settings)

with Trainer(config) as trainer:  # resumes if the run's folder holds a checkpoint
    trainer.fit()
print(f"loss {trainer.losses[0]:.3f} -> {trainer.losses[-1]:.3f}")

run = load_run(trainer.run_dir)
print(run.complete("def main(", max_new_tokens=40))
