"""What a page that we write or serve may do in a browser: run our script, and nothing that a file's text brings along.

A content security policy names the page's own scripts by their hashes, so that a text that got past the escaping would still not
run; and the page may ask no server, save its own if it is served.
"""

import base64
import hashlib


def content_policy(*scripts: str, connect: bool = False) -> str:
    """The content of a page's ``Content-Security-Policy``.

    Args:
        scripts: The text of each of the page's own scripts, all between its tags.
        connect: The page may ask the server that it comes from.
    """
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{found}'" for found in hashes) or "'none'"
    own = "'self'" if connect else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src {own}; "
        "base-uri 'none'; form-action 'none'"
    )
