"""Requests with images, which the server does not take, are refused with what does."""

import pytest
from titan_train.serve.requests import BadRequestError, Limits, read_chat


def test_a_message_with_an_image_is_refused_with_what_takes_it():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    content = [{"type": "text", "text": "How many?"}, image]
    with pytest.raises(
        BadRequestError, match=r"messages\[0\].content holds a part that is not text\. .* generate --image"
    ):
        read_chat({"messages": [{"role": "user", "content": content}]}, limits=Limits(8, 8, 1))
