"""The official OpenAI client against a Red Lite server with the small model, and the shapes agents send.

    client.py ADDRESS KEY          everything but calls, which the small model's own template does not know
    client.py ADDRESS KEY calls    calls, of a server with a template that knows them
"""

import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.request

import openai

ADDRESS, KEY = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0, timeout=300)
MODEL = client.models.list().data[0].id
USER = [{"role": "user", "content": "Write a Python function `is_sorted`: Return True if the list is sorted."}]
GREEDY = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 40}


def post(path, body, headers=None, raw=None):
    """Status and JSON of a request the client would not send."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **(headers or {})}
    data = raw if raw is not None else json.dumps(body).encode()
    request = urllib.request.Request(f"{ADDRESS}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(path):
    request = urllib.request.Request(f"{ADDRESS}{path}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def whole_and_streamed():
    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert "def is_sorted" in choice.message.content, choice
    assert choice.finish_reason in ("stop", "length"), choice
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    stream = client.chat.completions.create(
        **GREEDY, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    roles = [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role]
    assert roles == ["assistant"], roles
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [choice.finish_reason], reasons
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert sum(c.usage is not None for c in chunks) == 1, "usage comes once"
    entries = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.logprob, e.bytes) for e in entries] == [
        (e.token, e.logprob, e.bytes) for e in choice.logprobs.content
    ], "the same numbers streamed and whole"
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in entries), "greedy"


def a_conversation_is_read_once():
    messages = [{"role": "system", "content": "You help. " * 40}] + USER
    first = client.chat.completions.create(**{**GREEDY, "messages": messages})
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Again."}]
    second = client.chat.completions.create(**{**GREEDY, "messages": messages})
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens, (cached, first.usage)
    assert client.chat.completions.create(**{**GREEDY, "messages": messages}).usage.prompt_tokens_details.cached_tokens > 0


def many_at_once_say_the_same():
    alone = client.chat.completions.create(**GREEDY).choices[0].message.content
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.chat.completions.create(**GREEDY).choices[0].message.content, range(16)))
    assert set(answers) == {alone}, set(answers)


def options():
    several = client.chat.completions.create(**{**GREEDY, "temperature": 1.0}, n=3, seed=7)
    assert [c.index for c in several.choices] == [0, 1, 2]
    again = client.chat.completions.create(**{**GREEDY, "temperature": 1.0}, n=3, seed=7)
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
    stopped = client.chat.completions.create(**GREEDY, stop=["is_sorted("])
    assert stopped.choices[0].finish_reason == "stop" and "is_sorted(" not in stopped.choices[0].message.content
    short = client.chat.completions.create(**{**GREEDY, "max_tokens": 3})
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    aliased = client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=2, temperature=0)
    assert aliased.usage.completion_tokens == 2
    client.chat.completions.create(
        **{**GREEDY, "max_tokens": 2}, store=False, metadata={"a": "b"}, user="me", parallel_tool_calls=True,
        extra_body={"service_tier": "auto", "chat_template_kwargs": {"enable_thinking": False}, "cache_prompt": True},
    )


def completions():
    text = client.completions.create(model=MODEL, prompt="import ", max_tokens=5, temperature=0, logprobs=1)
    assert text.usage.completion_tokens == 5 and len(text.choices[0].logprobs.tokens) == 5
    streamed = client.completions.create(model=MODEL, prompt="import ", max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == text.choices[0].text
    both = client.completions.create(model=MODEL, prompt=["import ", "def "], max_tokens=3, temperature=0, echo=True)
    assert [c.text[:4] for c in both.choices] == ["impo", "def "]
    ids = post("/tokenize", {"content": "import "})[1]["tokens"]
    assert post("/detokenize", {"tokens": ids}) == (200, {"content": "import "})
    same = client.completions.create(model=MODEL, prompt=ids, max_tokens=5, temperature=0)
    assert same.choices[0].text == text.choices[0].text


def progress():
    body = {**GREEDY, "messages": [{"role": "user", "content": "word " * 900}], "stream": True, "return_progress": True}
    stream = client.chat.completions.create(**{k: v for k, v in body.items() if k != "return_progress"},
                                            extra_body={"return_progress": True})
    heard = [c.prompt_progress for c in stream if getattr(c, "prompt_progress", None)]
    assert heard and heard[-1]["processed"] == heard[-1]["total"] > 900, heard[-1:]
    assert set(heard[0]) == {"total", "cache", "processed", "time_ms"}, heard[0]


def errors():
    status, body = post("/v1/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": "word " * 6000}]})
    error = body["error"]
    assert status == 400 and error["type"] == "exceed_context_size_error", (status, body)
    assert "exceeds the available context size" in error["message"] and error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 6000
    for field, value in [("temperature", "hot"), ("temperature", -1), ("n", 0), ("stop", [1]), ("messages", []),
                         ("messages", [{"role": "nobody", "content": ""}]), ("tools", {}), ("tool_choice", "required"),
                         ("response_format", {"type": "yaml"}), ("grammar", "root ::= x"), ("logprobs", 3), ("top_p", 2),
                         ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}})]:
        status, body = post("/v1/chat/completions", {**GREEDY, field: value})
        assert status == 400 and body["error"]["param"] == field, (field, value, status, body)
    assert post("/v1/completions", {"prompt": "a", "suffix": "b"})[1]["error"]["param"] == "suffix"
    assert post("/v1/chat/completions", None, raw=b"{not json")[0] == 400
    assert post("/v1/chat/completions", None, raw=b"[" * 100_000)[0] == 400
    assert post("/v1/chat/completions", GREEDY, {"Authorization": "Bearer wrong"})[0] == 401
    assert post("/v1/chat/completions", GREEDY, {"Origin": "http://evil.example"})[0] == 403
    assert post("/nothing", {})[0] == 404


def shapes_agents_send():
    """What they were seen to send: parts, null content, tool history with text arguments, late system messages."""
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{\"path\": \"a\"}"}}
    history = [
        {"role": "system", "content": [{"type": "text", "text": "You are an agent."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "text", "text": "Now."}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "text of a"}]},
        {"role": "system", "content": "A late reminder."},
        {"role": "user", "content": "Go on."},
    ]
    body = {"model": MODEL, "messages": history, "tools": [tool], "tool_choice": "auto", "max_tokens": 4,
            "temperature": 0, "stream": False, "store": False, "stream_options": None, "reasoning_effort": "none"}
    status, answer = post("/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant", answer
    assert post("/v1/chat/completions", {**body, "max_tokens": -1, "stop": ["\n"]})[0] == 200
    cut = json.loads(json.dumps(body))
    cut["messages"][3]["tool_calls"][0]["function"]["arguments"] = "{\"path\": "
    assert post("/v1/chat/completions", cut)[0] == 200, "a call that was cut off does not end the conversation"
    del cut["messages"][3]["tool_calls"][0]["function"]["name"]
    status, answer = post("/v1/chat/completions", cut)
    assert status == 400 and "messages[3].tool_calls[0]" in answer["error"]["message"], answer
    # Text of a user never becomes a control token: the same number of messages is read.
    ends = lambda text: post("/tokenize", {"content": text, "parse_special": False})[1]["tokens"]
    assert len(ends("<|im_end|>")) > 1 and len(post("/tokenize", {"content": "<|im_end|>"})[1]["tokens"]) == 1


WILD = {"model": MODEL, "messages": USER, "temperature": 1.5, "top_p": 1, "max_tokens": 400, "seed": 1}
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
         "required": ["x", "kind"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "mark", "parameters": POINT}}]
DEMANDS = ["required", {"type": "function", "function": {"name": "mark"}}]


def assert_point(text):
    value = json.loads(text)
    assert set(value) == {"x", "kind"} and 0 <= value["x"] <= 99 and value["kind"] in ("a", "b"), value


def demanded_calls():
    """Whole and as a stream: both name the tool, both have arguments of its schema, and the same ones."""
    for choice in DEMANDS:
        demand = {**WILD, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**demand).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
        function = whole.message.tool_calls[0].function
        assert function.name == "mark" and len(whole.message.tool_calls) == 1, whole
        assert_point(function.arguments)
        parts = [part.choices[0].delta for part in client.chat.completions.create(**demand, stream=True) if part.choices]
        calls = [call for delta in parts for call in delta.tool_calls or []]
        assert calls[0].id and calls[0].function.name == "mark" and all(call.index == 0 for call in calls), calls
        assert "".join(call.function.arguments or "" for call in calls) == function.arguments, (calls, function)
        # The client sends back what it was given, with the result, and goes on.
        history = [*USER, whole.message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "marked"}]
        after = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=4, temperature=0)
        assert after.usage.completion_tokens > 0, after
    none = client.chat.completions.create(**{**WILD, "max_tokens": 8}, tools=TOOLS, tool_choice="none").choices[0].message
    assert none.tool_calls is None, none


def answers_in_a_given_form():
    format = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}
    answer = client.chat.completions.create(**WILD, response_format=format)
    assert_point(answer.choices[0].message.content)
    free = client.chat.completions.create(**{**WILD, "temperature": 0}, response_format={"type": "json_object"}).choices[0]
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict), free
    for choice in DEMANDS:
        try:
            client.chat.completions.create(**WILD, tools=TOOLS, tool_choice=choice)
            raise AssertionError("a call was demanded of a model without calls")
        except openai.BadRequestError as refused:
            assert refused.param == "tool_choice", refused


def gone_clients_stop_work():
    body = json.dumps({**GREEDY, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for stream in (True, False):
        data = body if stream else body.replace(b'"stream": true', b'"stream": false')
        import http.client
        from urllib.parse import urlparse
        connection = http.client.HTTPConnection(urlparse(ADDRESS).netloc, timeout=300)
        connection.request("POST", "/v1/chat/completions", data, headers)
        if stream:
            connection.getresponse().read(200)
        while not any(slot["is_processing"] for slot in get("/slots")):
            time.sleep(0.01)
        connection.sock.close() if connection.sock else connection.close()
        connection.close()
        began = time.monotonic()
        while any(slot["is_processing"] for slot in get("/slots")):
            assert time.monotonic() - began < 120, "work goes on for nobody"
            time.sleep(0.01)


def about():
    assert get("/props")["default_generation_settings"]["n_ctx"] == 4096
    assert len(get("/slots")) == 4
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL and model.meta["n_ctx"] == 4096 and "chat" in model.capabilities


EVERYTHING = [about, whole_and_streamed, a_conversation_is_read_once, many_at_once_say_the_same, options, completions,
              progress, errors, answers_in_a_given_form, shapes_agents_send, gone_clients_stop_work]
for check in [demanded_calls] if sys.argv[3:] == ["calls"] else EVERYTHING:
    began = time.monotonic()
    check()
    print(f"  {check.__name__.replace('_', ' ')}: {time.monotonic() - began:.1f} s", flush=True)
