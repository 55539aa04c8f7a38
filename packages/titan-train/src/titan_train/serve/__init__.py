"""An endpoint on loopback that speaks OpenAI's protocol, for trying a trained model.

- `app`: the routes and their answers. `requests`: what a request may ask, and what is wrong with it.
- `worker`: the model, one request at a time in a thread of its own.
- `loopback`: serve an app on this machine only.
- ``chat.html``: the page to chat in.

Not for production: one process, no batching across requests, no authentication.
"""
