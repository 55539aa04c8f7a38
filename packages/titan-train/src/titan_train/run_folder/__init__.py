"""A run's folder: what lies in it, who may write to it, and when a new attempt takes effect::

    runs/NAME/config.toml     the resolved configuration
              run.json        versions, command, device, times, status of every attempt, settings by step, parent
              tokenizer/      the tokenizer and its chat template
              vision_index.txt  which index of images and prompts the run began with
              layout.txt      which rank does what
              pipeline.json   one step as the pipeline's ranks ran it
              metrics.jsonl   one line per step
              metrics.blocks.jsonl  means of 64 steps a line, made from it
              attempts.jsonl  one line per attempt: its settings, how it ended
              model/          of a folder of Hugging Face: config.json of model.name, the tokens that end texts of model.init
              checkpoints/    step-*/, each complete or absent
              logs/           what each rank printed
              report.html     the run on one page
              lease.json      the process that runs it now
              machine-N.lease.json  the process that is machine N of it
              staged/         an attempt whose ranks have not restored yet
              set_aside/      checkpoints after a step that the run was made to go back to

`contents` reads the folder and brings it to the disk. `place` checks whether a run can use it. `lease` makes sure that one run
at a time writes to it. `staging` holds back the configuration and the run information of an attempt until all its ranks have
restored: a refusal before that leaves the folder as it was. `record` lets the attempt take effect, and keeps which settings each
step was made with. `starts` finds the step of another run that a run begins with, and `rewind` goes back in the same folder.

No torch: the command line and the report use it.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.run_folder.contents import (
        BEST,
        checkpoint_folders,
        in_folder,
        keep_model,
        kept_stop_ids,
        newest_checkpoint,
        pipeline_file,
        read_config,
        run_folder,
        sync_run_folder,
        with_kept_model,
    )
    from titan_train.run_folder.lease import (
        LEASE,
        TAKEN_OVER,
        Lease,
        LeaseLostError,
        is_held,
        lease_of_program,
        run_status,
    )
    from titan_train.run_folder.place import check_run_folder, check_writable
    from titan_train.run_folder.record import record_return, take_effect
    from titan_train.run_folder.rewind import check_rewind, set_best_aside, stage_rewind, staged_rewind
    from titan_train.run_folder.staging import changes, commit, discard, stage, staged_folder
    from titan_train.run_folder.starts import check_unused, continued_folder, find_start, resolve_starts

__all__ = [
    "BEST",
    "LEASE",
    "TAKEN_OVER",
    "Lease",
    "LeaseLostError",
    "changes",
    "check_rewind",
    "check_run_folder",
    "check_unused",
    "check_writable",
    "checkpoint_folders",
    "commit",
    "continued_folder",
    "discard",
    "find_start",
    "in_folder",
    "is_held",
    "keep_model",
    "kept_stop_ids",
    "lease_of_program",
    "newest_checkpoint",
    "pipeline_file",
    "read_config",
    "record_return",
    "resolve_starts",
    "run_folder",
    "run_status",
    "set_best_aside",
    "stage",
    "stage_rewind",
    "staged_folder",
    "staged_rewind",
    "sync_run_folder",
    "take_effect",
    "with_kept_model",
]

__getattr__ = first_use(__name__)
