"""The endpoint over loopback, by a plain HTTP client: OpenAI's shapes, streams, errors."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from titan_train.generation import LoadedRun, Sampling, TextPiece, encode_chat, encode_prompt, stream_text
from titan_train.serve import worker
from titan_train.tokenizers import ChatTemplate

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def run(loaded_run: Callable[..., LoadedRun]) -> LoadedRun:
    return loaded_run("gpt_debug", step=7)


@pytest.fixture(scope="module")
def client(run: LoadedRun) -> Iterator[Any]:
    from titan_train.serve.app import build_app

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # from here on a request waits for the server instead of being refused
    server = uvicorn.Server(uvicorn.Config(build_app(run, "tiny", max_new_tokens=400), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60, trust_env=False) as client:
        client.headers["Content-Type"] = "application/json"
        yield client
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    listening.close()


def whole(run: LoadedRun, prompt: list[int], count: int, **settings: Any) -> str:
    pieces = stream_text(run, [prompt], max_new_tokens=count, sampling=Sampling(**settings), seeds=[5])
    return "".join(piece.text for piece in pieces)


def test_the_model_is_listed_and_the_page_names_it(client: Any) -> None:
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    page = client.get("/")
    assert page.status_code == 200
    assert '"model": "tiny", "chat": true, "step": 7' in page.text


def test_a_completion_is_what_generate_gives(client: Any, run: LoadedRun) -> None:
    body = {"model": "tiny", "prompt": ["def f(", "x"], "max_tokens": 20, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert [choice["text"] for choice in answer["choices"]] == [
        whole(run, encode_prompt(run, text), 20) for text in ("def f(", "x")
    ]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}
    twice = client.post("/v1/completions", json=body | {"max_tokens": 2, "n": 2}).json()
    assert twice["usage"]["prompt_tokens"] == 7  # as OpenAI counts, whatever the answers
    sampled = {"prompt": "def f(", "max_tokens": 20, "temperature": 0.9, "top_p": 0.8, "seed": 5}
    text = client.post("/v1/completions", json=sampled).json()["choices"][0]["text"]
    assert text == whole(run, encode_prompt(run, "def f("), 20, temperature=0.9, top_p=0.8)


def events(reply: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_streams_what_it_answers_at_once(client: Any, run: LoadedRun) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 30, "temperature": 0}
    want = whole(run, encode_chat(run, messages), 30)
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": want}
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        found = events(reply)
    assert len(found) > 5
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(event["choices"][0]["delta"]["content"] for event in found) == want
    assert [event["choices"][0]["finish_reason"] for event in found][-1] == "length"
    counted = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=counted) as reply:
        *others, last = events(reply)
    with client.stream("POST", "/v1/chat/completions", json=counted | {"n": 3}) as reply:
        assert events(reply)[-1]["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 30
    assert (last["choices"], last["usage"]) == ([], usage)
    assert {event["usage"] for event in others} == {None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (
        client.post("/v1/chat/completions", json=body | {"messages": parts}).json()["choices"][0]["message"] == message
    )


def test_a_chat_ends_where_the_template_ends_an_answer_and_a_completion_goes_on(run: LoadedRun) -> None:
    from titan_train.serve.app import build_app

    said = stream_text(run, [encode_prompt(run, "x")], max_new_tokens=40, sampling=Sampling())
    text = "".join(piece.text for piece in said)
    word = text[8:10]
    # the answer is empty, so that the model continues the same text
    template = ChatTemplate.of(
        run.tokenizer,
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + word + "{% endif %}{% endfor %}",
    )
    transport = httpx.ASGITransport(app=build_app(replace(run, template=template), "tiny"))

    async def ask(path: str, body: Any) -> Any:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post(path, json=body | {"max_tokens": 40, "temperature": 0})).json()["choices"][0]

    chat = asyncio.run(ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}))
    assert chat["message"]["content"] == text.split(word)[0]
    assert chat["finish_reason"] == "stop"
    assert asyncio.run(ask("/v1/completions", {"prompt": "x"}))["text"] == text


def test_compiling_a_model_without_this_cache_is_refused_at_the_start(run: LoadedRun) -> None:
    from titan_train.serve.app import build_app

    with pytest.raises(ValueError, match=r"--compile: the step of tiny cannot be compiled"):
        build_app(replace(run, model=torch.nn.Linear(1, 1)), "tiny", compiled=True)


def test_an_answer_that_nobody_limited_ends_where_the_model_ends(client: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x" * 500, "temperature": 0}).json()
    assert answer["usage"]["completion_tokens"] <= 12
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_stop_word_ends_the_answer(client: Any, run: LoadedRun) -> None:
    text = whole(run, encode_prompt(run, "x"), 40)
    word = text[8:10]
    body = {"prompt": "x", "max_tokens": 40, "temperature": 0, "stop": word}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == text.split(word)[0]
    assert choice["finish_reason"] == "stop"


def test_a_client_that_leaves_frees_the_model(client: Any) -> None:
    body = {"prompt": "x", "max_tokens": 400, "temperature": 1.5, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    start = time.monotonic()
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    whole_answer = client.post("/v1/completions", json=body | {"stream": False})
    assert whole_answer.json()["usage"]["completion_tokens"] > 0
    assert time.monotonic() - start < 60


def test_a_client_that_leaves_before_a_whole_answer_frees_the_model(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def slow(*_: Any, **__: Any) -> Iterator[TextPiece]:
        for number in range(1, 151):
            time.sleep(0.02)
            made.append(number)
            yield TextPiece(0, "x", "length" if number == 150 else "", number)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "stream_text", slow)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "x"}, timeout=0.2)
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert 0 < len(made) < 100


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "words"),
    [
        ("completions", {"prompt": ""}, 400, "prompt", "a text of at least one character"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "from 0 to 100"),
        ("completions", {"prompt": "x", "temperature": True}, 400, "temperature", "must be a number"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p", "must be above 0 and at most 1"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "from 1 to 400"),
        ("completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias", "not supported here"),
        ("completions", {"prompt": "x", "temprature": 1}, 400, "temprature", "not a field that is known"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop", "none of them empty"),
        ("completions", {"prompt": "x" * 500, "max_tokens": 50}, 400, "prompt", "or ask for at most 12 new tokens"),
        ("completions", {"prompt": "x" * 500, "max_tokens": 50, "stream": True}, 400, "prompt", "has learned 512"),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options", "is for stream=true"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "surrogates not allowed"),
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, None, "'gpt-9' does not exist; this is 'tiny'"),
        (
            "completions",
            {"prompt": "x" * 513, "max_tokens": 1},
            400,
            "prompt",
            "has 513 tokens, and this server takes 512",
        ),
        ("completions", {"prompt": ["x"] * 9, "n": 2}, 400, "prompt", "18 answers are asked for"),
        ("completions", {"prompt": "x", "n": 17}, 400, "n", "from 1 to 16"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "16 texts of 256 characters"),
        ("completions", {"prompt": "x", "stop": "a" * 257}, 400, "stop", "16 texts of 256 characters"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least one message"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0]", "content must be a text"),
        ("completions", [1], 400, None, "must be a JSON object"),
        ("nothing", {}, 404, None, "Not Found"),
    ],
)
def test_a_bad_request_gets_an_error_of_openais_shape(
    client: Any, path: str, body: Any, status: int, field: str | None, words: str
) -> None:
    reply = client.post(f"/v1/{path}", content=json.dumps(body))
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert words in error["message"]


def test_other_bad_requests_are_refused_too(client: Any) -> None:
    assert "not valid JSON" in client.post("/v1/completions", content="{").json()["error"]["message"]
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/v1/completions", content=b" " * 5_000_000).json()["error"]["message"].startswith("the body")
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400


def test_a_browser_chats_on_the_page_without_a_complaint(client: Any, browser: Any) -> None:
    page = browser.open(str(client.base_url))
    assert page.ask("document.getElementById('model').textContent") == "tiny, step 7"
    page.ask("""document.getElementById("tokens").value = 5; document.getElementById("text").value = "hello";
document.getElementById("form").requestSubmit(); 0""")
    page.wait_until("document.querySelectorAll('.turn').length === 2 && document.getElementById('stop').hidden")
    assert page.ask("[...document.querySelectorAll('.turn')].map((turn) => turn.className)") == [
        "turn user",
        "turn assistant",
    ]
    assert page.ask("document.querySelector('.turn').textContent") == "hello"
    assert page.ask("document.querySelectorAll('.error').length") == 0
    assert page.errors == []
    page.close()
