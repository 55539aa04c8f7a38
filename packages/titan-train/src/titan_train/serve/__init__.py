"""An endpoint on loopback that speaks OpenAI's protocol, for trying a trained model.

- `app`: the routes and their answers. `requests`: what a request may ask, and what is wrong with it.
- `worker`: the model, one request at a time in a thread of its own.
- `folder`: a run, an exported folder or one of the hub as what is served.
- `loopback`: serve an app on this machine only, or to who knows a token.
- ``chat.html``: the page to chat in.

Not for production: one process, no batching across requests, no TLS.
"""
