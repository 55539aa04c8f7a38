"""What is served on loopback is answered to programs of this machine and to its own page, and to nobody else."""

import asyncio
import json

import pytest
from titan_train.cli import main
from titan_train.serve.loopback import LocalOnly, WithToken, refusal_of

HOST = ("host", "127.0.0.1:8000")
JSON = ("content-type", "application/json")
OWN = [HOST, JSON, ("origin", "http://127.0.0.1:8000"), ("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")]
OPENED = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", [HOST]),
        ("GET", [("host", "localhost")]),
        ("GET", [("host", "[::1]:8000")]),
        ("POST", [HOST, JSON]),  # a program
        ("POST", [HOST, ("content-type", "application/json; charset=utf-8")]),
        ("POST", OWN),
        ("GET", [HOST, ("sec-fetch-site", "none"), *OPENED]),  # typed into the bar
        ("GET", [HOST, ("sec-fetch-site", "cross-site"), *OPENED]),  # a link
    ],
)
def test_programs_of_this_machine_and_the_own_page_are_answered(method, headers):
    assert refusal_of(method, headers) is None


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", [HOST, ("content-type", "text/plain")], 415),  # what a page of another site may send unasked
        ("POST", [HOST, ("content-type", "application/x-www-form-urlencoded")], 415),
        ("POST", [HOST, ("content-type", "multipart/form-data; boundary=x")], 415),
        ("POST", [HOST], 415),
        ("DELETE", [HOST], 415),
        ("POST", [HOST, JSON, ("origin", "https://evil.example")], 403),
        ("POST", [HOST, JSON, ("origin", "null")], 403),
        ("POST", [HOST, JSON, ("origin", "http://localhost:8000")], 403),
        ("POST", [HOST, JSON, ("origin", "http://127.0.0.1:3000")], 403),  # another program's page
        ("POST", [HOST, JSON, ("origin", "chrome-extension://127.0.0.1:8000")], 403),
        ("POST", [HOST, JSON, ("sec-fetch-site", "cross-site"), *OPENED], 403),
        ("GET", [HOST, ("sec-fetch-site", "cross-site")], 403),  # an image, a script
        ("GET", [HOST, ("sec-fetch-site", "same-site")], 403),
        (
            "GET",
            [HOST, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
            403,
        ),
        ("GET", [("host", "testserver")], 400),
        ("GET", [("host", "evil.example")], 400),
        ("GET", [("host", "127.0.0.1.evil.example")], 400),
        ("GET", [("host", "localhost:8000@evil.example")], 400),
        ("GET", [HOST, ("host", "localhost")], 400),
        ("GET", [], 400),
    ],
)
def test_a_page_of_another_site_is_refused(method, headers, status):
    refusal = refusal_of(method, headers)
    assert refusal is not None
    assert refusal[0] == status


def ask(app, scope):
    """The messages that an app answers with."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    asyncio.run(app(scope, receive, send))
    return sent


def request(*headers, method="GET"):
    return {"type": "http", "method": method, "headers": [(k.encode(), v.encode()) for k, v in headers]}


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def test_answers_may_not_be_framed_nor_read_by_others_and_sockets_are_closed():
    start, body = ask(LocalOnly(page), request(HOST))
    headers = dict(start["headers"])
    assert body["body"] == b"page"
    assert headers[b"content-security-policy"] == b"frame-ancestors 'none'"
    assert headers[b"cross-origin-resource-policy"] == b"same-origin"
    assert headers[b"x-content-type-options"] == b"nosniff"
    start, body = ask(LocalOnly(page), request(("host", "evil.example")))
    assert start["status"] == 400
    assert "names of this machine" in json.loads(body["body"])["error"]["message"]
    assert ask(LocalOnly(page), {"type": "websocket"}) == [{"type": "websocket.close", "code": 1008}]


def test_other_machines_are_answered_with_the_token_alone():
    app = WithToken(page, token="0123456789abcdef")
    elsewhere = ("host", "gpu-7.example:8000")
    start, _ = ask(app, request(elsewhere, ("authorization", "Bearer 0123456789abcdef")))
    assert start["status"] == 200
    for headers in ((), (("authorization", "Bearer 0123456789abcdeg"),), (("authorization", "0123456789abcdef"),)):
        start, body = ask(app, request(elsewhere, *headers))
        assert start["status"] == 401
        assert "api_key" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "clients must send a token"), ("short", "at least 16"), ("of several words, long", "one word")],
)
def test_a_host_without_a_secret_is_refused_before_anything_is_loaded(token, words, tmp_path, capsys):
    options = ["--host", "0.0.0.0"]
    if token is not None:
        (tmp_path / "token").write_text(token)
        options += ["--token-file", str(tmp_path / "token")]
    assert main(["serve", str(tmp_path / "no-run"), *options]) == 2
    assert words in capsys.readouterr().err


def test_only_so_many_requests_are_held_at_a_time():
    async def ask_all():
        free, statuses = asyncio.Event(), []

        async def slow(scope, receive, send):
            await free.wait()
            await page(scope, receive, send)

        async def send(message):
            statuses.append(message.get("status"))
            if len([s for s in statuses if s == 503]) == 2:
                free.set()

        app = LocalOnly(slow, most_at_once=3)
        await asyncio.gather(*(app(request(HOST), page, send) for _ in range(5)))
        return [status for status in statuses if status]

    assert sorted(asyncio.run(ask_all())) == [200, 200, 200, 503, 503]


@pytest.mark.parametrize("which", ["serve", "watch --web"])
def test_every_server_is_behind_it(which, tmp_path):
    pytest.importorskip("starlette")
    from titan_train.config import parse_config
    from titan_train.generation import LoadedRun
    from titan_train.report.live import build_live_app
    from titan_train.serve.app import build_app

    app = (
        build_live_app(tmp_path)
        if which != "serve"
        else build_app(LoadedRun(parse_config({}), None, None, 1, None), "x")
    )
    scope = request(("host", "testserver"), ("origin", "https://evil.example")) | {"path": "/", "query_string": b""}
    assert ask(app, scope)[0]["status"] == 400
    assert ask(app, scope | request(HOST, ("sec-fetch-site", "cross-site")))[0]["status"] == 403
