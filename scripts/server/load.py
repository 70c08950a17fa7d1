#!/usr/bin/env python3
"""Load on a Red Lite server with the small model, and kills in mid-write.

    scripts/server/load.py REDLITE_BINARY [--seconds 30] [--clients 32] [--kills 5]

Clients ask what has a known greedy answer, alone and several at once, whole and as streams; they go away in the middle of
everything, send nonsense and halves, send and read slowly. Then the server is killed (SIGKILL) while it stores sessions,
and started again. Ends with status 1 on a wrong answer, an answer 5xx, memory that grows, work that goes on for clients
that have gone, or a stored session that is lost. Time is counted in seconds that this program itself has run: it may be
stopped and continued.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from urllib.parse import urlparse

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SUBJECTS = ["is_sorted", "flatten", "count_words", "reverse", "primes", "median", "unique", "parse_date"]


class Server:
    def __init__(self, binary, state, cache=64):
        self.log = tempfile.TemporaryFile()
        command = [binary, "serve", str(ROOT / "models/pocket.gguf"), "--port", "0", "--context", "2048", "--parallel", "8",
                   "--queue", "16", "--session-cache", str(cache), "--state-dir", state]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.address = urlparse(self.process.stdout.readline().strip()).netloc
        assert self.address, "the server did not start"

    def request(self, method, path, body=None, timeout=900):
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        return connection, connection.getresponse()

    def json(self, method, path, body=None):
        connection, response = self.request(method, path, body)
        value = json.load(response)
        connection.close()
        return response.status, value

    def memory(self):
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, kill=False):
        self.process.kill() if kill else self.process.terminate()
        return self.process.wait(timeout=60)


def prompt(number):
    """A conversation of a few hundred tokens."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    rules = " ".join(f"Rule {n} of {number}: keep `{subject}` simple." for n in range(25))
    return [{"role": "system", "content": rules},
            {"role": "user", "content": f"Write a Python function `{subject}`."}]


def body(number, **more):
    return {"messages": prompt(number), "temperature": 0, "max_tokens": 24, **more}


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


class Load:
    def __init__(self, server, known, seconds):
        self.server, self.known, self.left = server, known, seconds
        self.counts, self.wrong, self.lock = {}, [], threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def client(self, seed):
        dice = random.Random(seed)
        acts = [self.ask, self.several, self.stream, self.leave, self.half, self.slow_sender, self.nonsense]
        while self.left > 0:
            act = dice.choices(acts, [8, 1, 6, 5, 2, 1, 4])[0]
            try:
                act(dice)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                with self.lock:
                    self.wrong.append(f"{act.__name__}: {error!r}")

    def check(self, number, text, what):
        self.count(what)
        if text != self.known[number]:
            with self.lock:
                self.wrong.append(f"{what} {number}: {text!r} instead of {self.known[number]!r}")

    def ask(self, dice):
        number = dice.randrange(len(self.known))
        status, answer = self.server.json("POST", "/v1/chat/completions", body(number))
        if status == 429:
            self.count("told to come back")
            time.sleep(dice.random() / 5)
        else:
            assert status == 200, answer
            self.check(number, text_of(answer), "answers")

    def stream(self, dice):
        number = dice.randrange(len(self.known))
        connection, response = self.server.request("POST", "/v1/chat/completions", body(number, stream=True))
        slow, text = dice.random() < 0.2, ""
        for line in response:
            if slow:
                time.sleep(0.02)
            if response.status == 200 and line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
        connection.close()
        assert response.status in (200, 429), response.status
        if response.status == 200:
            self.check(number, text, "slow streams" if slow else "streams")

    def several(self, dice):
        """Answers to one question at once: the same ones."""
        number = dice.randrange(len(self.known))
        status, answer = self.server.json("POST", "/v1/chat/completions", body(number, n=3))
        if status == 429:
            self.count("told to come back")
        else:
            assert status == 200, answer
            for choice in answer["choices"]:
                self.check(number, choice["message"]["content"], "answers, three at once")

    def leave(self, dice):
        """Asks for much, and goes away: while it waits, is read, or answered."""
        number = dice.randrange(len(self.known))
        wanted = body(number, stream=dice.random() < 0.5, max_tokens=1000, ignore_eos=True)
        self.hang_up(json.dumps(wanted).encode(), dice)
        self.count("clients gone")

    def half(self, dice):
        """Goes away in the middle of the request."""
        wanted = json.dumps(body(0)).encode()
        self.hang_up(wanted[:dice.randrange(len(wanted))], dice, len(wanted))
        self.count("half requests")

    def hang_up(self, sent, dice, length=None):
        connection = socket.create_connection(self.server.address.split(":"), timeout=900)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        time.sleep(dice.random() / 3)
        if dice.random() < 0.5:  # with a reset instead of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def slow_sender(self, dice):
        number = dice.randrange(len(self.known))
        wanted = json.dumps(body(number)).encode()
        connection = http.client.HTTPConnection(self.server.address, timeout=900)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", str(len(wanted)))
        connection.endheaders()
        began, step = time.monotonic(), len(wanted) // 5 + 1
        try:
            for start in range(0, len(wanted), step):
                connection.send(wanted[start:start + step])
                time.sleep(dice.random() / 10)
            response = connection.getresponse()
        except ConnectionError:
            # Bodies have a minute; this program may have been stopped for longer in the middle of one.
            assert time.monotonic() - began > 55, "hung up on a slow sender"
            self.count("slow senders told that it took too long")
            return
        answer = json.load(response)
        connection.close()
        assert response.status in (200, 429), answer
        if response.status == 200:
            self.check(number, text_of(answer), "slow senders")

    def nonsense(self, dice):
        bodies = [b"", b"{", b"[]", b"[" * 5000, b'{"messages": 3}', b'{"messages": [{"role": "user"', os.urandom(200),
                  b'{"messages": [{"role": "user", "content": "x"}], "temperature": "warm"}', b"\xff" * 100]
        status, _ = self.server.json("POST", "/v1/chat/completions", dice.choice(bodies))
        assert status == 400, status
        self.count("nonsense refused")

    def run(self, clients):
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(clients)]
        samples = []
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            samples.append(self.server.memory())
            time.sleep(1)
            self.left -= 1
        for thread in threads:
            thread.join()
        return samples


def load(binary, options, state):
    server = Server(binary, state)
    known = [text_of(server.json("POST", "/v1/chat/completions", body(number))[1]) for number in range(24)]
    run = Load(server, known, options.seconds)
    samples = run.run(options.clients)
    for _ in range(200):  # those who left are noticed within moments
        if not any(slot["is_processing"] for slot in server.json("GET", "/slots")[1]):
            break
        time.sleep(0.05)
    else:
        run.wrong.append("work goes on for clients that have gone")
    again = [text_of(server.json("POST", "/v1/chat/completions", body(number))[1]) for number in range(24)]
    if again != known:
        run.wrong.append("answers have changed")
    half, end = max(samples[:len(samples) // 2 + 1]), max(samples[len(samples) // 2:])
    print(f"load: {options.clients} clients, {options.seconds} s")
    for what, count in sorted(run.counts.items()):
        print(f"  {count:6} {what}")
    print(f"memory: at most {half >> 20} MiB in the first half, {end >> 20} MiB in the second")
    if end > half * 1.05 + (16 << 20):
        run.wrong.append("memory grows")
    assert server.stop() == 0, "it did not stop cleanly"
    return run.wrong


class Conversation:
    """A first turn that is longer than a segment on disk, and a second one whose answer is known."""

    def __init__(self, server, number):
        rules = " ".join(f"Rule {n} of {number}: keep it simple." for n in range(120))
        self.messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Write a function."}]
        status, answer = server.json("POST", "/v1/chat/completions", self.request(max_tokens=12))
        assert status == 200, answer
        self.read = answer["usage"]["prompt_tokens"]
        assert self.read > 1024, self.read
        self.messages += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "Go on."}]
        self.expected = None

    def request(self, **more):
        return {"messages": self.messages, "temperature": 0, **more}

    def go_on(self, server):
        """The second answer, and how many tokens did not have to be read for it."""
        status, answer = server.json("POST", "/v1/chat/completions", self.request(max_tokens=8))
        assert status == 200, answer
        return text_of(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def files(state, ending):
    return {path.name for path in pathlib.Path(state).glob(f"*/*.{ending}")}


def stored(server, state, number):
    """A conversation whose first turn is on disk as a whole."""
    before = files(state, "state")
    conversation = Conversation(server, number)
    while len(files(state, "state") - before) < 2:  # what many begin with, and the end of the answer
        time.sleep(0.001)
    conversation.expected, cached = conversation.go_on(server)
    assert cached >= conversation.read, cached
    return conversation


def kills(binary, options, state):
    """Sessions that have been stored are there after every kill, and go on with the same words."""
    wrong, dice, known, middle, checked = [], random.Random(1), [], 0, 0
    for round_ in range(options.kills):
        before = files(state, "state")
        server = Server(binary, state, cache=64)
        lost = before - files(state, "state")
        if lost:
            wrong.append(f"kill {round_}: {len(lost)} entries were refused")
        for conversation in known[-1:] + dice.sample(known, min(2, len(known))):
            text, cached = conversation.go_on(server)
            checked += 1
            if cached < conversation.read:
                wrong.append(f"kill {round_}: only {cached} of {conversation.read} tokens were there")
            if text != conversation.expected:
                wrong.append(f"kill {round_}: {text!r} instead of {conversation.expected!r}")
        known.append(stored(server, state, 10 * round_))
        # Writes are under way when it dies.
        Conversation(server, 10 * round_ + 1)
        time.sleep(dice.random() / 50)
        server.stop(kill=True)
        middle += bool(files(state, "tmp"))
    print(f"kills: {options.kills}, {middle} of them in the middle of a file; {checked} stored conversations gone on with, "
          + ("nothing lost, no other word" if not wrong else f"{len(wrong)} findings"))
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    state = tempfile.mkdtemp(prefix="redlite-load-")
    try:
        wrong = load(options.binary, options, state) + kills(options.binary, options, state)
    finally:
        shutil.rmtree(state, ignore_errors=True)
    for finding in wrong[:20]:
        print(f"WRONG {finding}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
