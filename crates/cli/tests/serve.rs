//! `redlite serve`, the real binary: it starts, answers, remembers, and stops.

#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use common::{Folder, command, fails, pocket};
use serde_json::{Value, json};

struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(more: &[&str]) -> Server {
        let model = pocket();
        let args = [
            &["serve", &model, "--port", "0", "--context", "1024", "--session-cache", "64", "--quiet"],
            more,
        ]
        .concat();
        let mut process = command(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").expect("its address").to_owned();
        Server { process, address }
    }

    /// Status and body.
    fn ask(&self, method: &str, path: &str, header: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n{header}\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn json(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// Asks it to stop, and waits until it has.
    fn stop(mut self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert_eq!(self.process.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Where a test has failed it is still there.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    let folder = Folder::new("serve-state");
    let state = folder.0.display().to_string();
    let mut messages =
        vec![json!({"role": "user", "content": "Write a Python function `is_sorted`. ".repeat(30)})];
    let ask = |server: &Server, messages: &[Value]| {
        server
            .json("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 12, "temperature": 0}))
    };
    let server = Server::start(&["--state-dir", &state]);
    let first = ask(&server, &messages);
    server.stop();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "Thanks."}));
    let server = Server::start(&["--state-dir", &state]);
    let second = ask(&server, &messages);
    let (before, cached) =
        (&first["usage"]["prompt_tokens"], &second["usage"]["prompt_tokens_details"]["cached_tokens"]);
    assert!(cached.as_u64() >= before.as_u64(), "{cached} of {before}");
    server.stop();
}

#[test]
fn keys_paths_and_bodies_are_checked() {
    let server = Server::start(&["--api-key", "secret"]);
    let key = "Authorization: Bearer secret\r\n";
    assert_eq!(server.ask("GET", "/health", "", "").0, 200);
    assert_eq!(server.ask("GET", "/v1/models", "", "").0, 401);
    assert_eq!(server.ask("GET", "/v1/models", key, "").0, 200);
    assert_eq!(server.ask("GET", "/v1/other", key, "").0, 404);
    assert_eq!(server.ask("GET", "/v1/completions", key, "").0, 405);
    assert_eq!(server.ask("POST", "/v1/completions", key, "{").0, 400);
    let (status, answer) = server.ask("POST", "/v1/completions", key, "{\"prompt\": [9999999]}");
    assert_eq!(status, 400, "{answer}");
    let page = format!("{key}Origin: http://evil.example\r\n");
    assert_eq!(server.ask("POST", "/v1/completions", &page, "{\"prompt\": \"a\"}").0, 403);
    // Its port is taken: said before the model is loaded.
    let port = server.address.rsplit(':').next().unwrap();
    fails(&["serve", "no such file", "--port", port], 2, &["cannot listen", port]);
    server.stop();
}
