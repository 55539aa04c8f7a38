"""Diffusion: flow matching on packed latents, guided by text.

- `task`: the `titan_train.Task`: loss, data, context parallelism, samples.
- `flow`: noise, times and dropped texts of a sample, each a function of the seed and the sample's number.
- `batches`: microbatches of `flow` on any set of latents and text features.
- `source`: the data that a run names, and the captions that it samples. ``shards/``: encoded images, and what encodes them.
- `shapes`: coloured shapes with captions, in closed form: data for tests and the example.
- `context`: context parallelism of two streams.
- `sampling`: Euler steps with guidance, and PNG files. `show`: images of captions by a trained model.
"""
