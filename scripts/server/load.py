#!/usr/bin/env python3
"""Load on a Red Lite server with the small model, and kills in mid-write.

    scripts/server/load.py REDLITE_BINARY [--seconds 30] [--clients 32] [--kills 5]

Clients hold conversations whose greedy answers are known, go away in the middle, send nonsense, and read slowly. Then the
server is killed (SIGKILL) while it stores sessions, and started again. Ends with status 1 on a wrong answer, an
answer 5xx, memory that grows, or a stored session that is lost.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import shutil
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

    def request(self, method, path, body=None, timeout=120):
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
        self.server, self.known, self.end = server, known, time.monotonic() + seconds
        self.counts, self.wrong, self.lock = {}, [], threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def client(self, seed):
        dice = random.Random(seed)
        while time.monotonic() < self.end:
            act = dice.choices([self.ask, self.stream, self.leave, self.nonsense], [4, 3, 3, 2])[0]
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

    def leave(self, dice):
        number = dice.randrange(len(self.known))
        connection = http.client.HTTPConnection(self.server.address, timeout=60)
        wanted = json.dumps(body(number, stream=dice.random() < 0.5, max_tokens=1000, ignore_eos=True))
        connection.request("POST", "/v1/chat/completions", wanted, {"Content-Type": "application/json"})
        time.sleep(dice.random() / 3)
        connection.sock.close()
        connection.close()
        self.count("clients gone")

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
    half = max(samples[len(samples) // 3:len(samples) // 2 + 1])
    end = max(samples[-max(1, len(samples) // 4):])
    print(f"load: {options.clients} clients, {options.seconds} s: {run.counts}")
    print(f"memory: {half >> 20} MiB in the first half, {end >> 20} MiB at the end")
    if end > half * 1.15 + (32 << 20):
        run.wrong.append("memory grows")
    assert server.stop() == 0, "it did not stop cleanly"
    return run.wrong


def kills(binary, options, state):
    """A session that has been stored once is there after every kill."""
    wrong, dice = [], random.Random(1)
    server = Server(binary, state)
    messages = prompt(1000)
    first = server.json("POST", "/v1/chat/completions", body(1000))[1]
    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Go on."}]
    follow = {"messages": messages, "temperature": 0, "max_tokens": 8}
    assert server.stop() == 0  # stored by now
    expected = None
    for round_ in range(options.kills):
        server = Server(binary, state, cache=256)
        status, answer = server.json("POST", "/v1/chat/completions", follow)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if status != 200 or cached < first["usage"]["prompt_tokens"]:
            wrong.append(f"kill {round_}: only {cached} tokens were there")
        expected = expected or text_of(answer)
        if text_of(answer) != expected:
            wrong.append(f"kill {round_}: another answer")
        # Writes are under way when it dies.
        for number in range(3):
            server.json("POST", "/v1/chat/completions", body(2000 + 10 * round_ + number, max_tokens=2))
        time.sleep(dice.random() / 50)
        server.stop(kill=True)
    print(f"kills: {options.kills}, nothing lost" if not wrong else f"kills: {len(wrong)} findings")
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
