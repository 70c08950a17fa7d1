//! `redlite pull`, the real binary, against a server of the test's own.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use common::{Folder, command, repository, stderr, stdout};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A request that has come.
#[derive(Clone, Debug)]
struct Seen {
    path: String,
    headers: BTreeMap<String, String>,
}

impl Seen {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What is answered.
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// The length that is announced.
    length: usize,
    /// Keeps the connection open after the body, however long it should be.
    hold: bool,
}

impl Answer {
    fn new(status: u16, body: impl Into<Vec<u8>>) -> Answer {
        let body = body.into();
        Answer { status, headers: Vec::new(), length: body.len(), body, hold: false }
    }

    fn with(mut self, name: &'static str, value: impl ToString) -> Answer {
        self.headers.push((name, value.to_string()));
        self
    }

    /// Ends after so many bytes, though more were announced.
    fn cut(mut self, at: usize) -> Answer {
        self.body.truncate(at);
        self
    }
}

/// A file as good servers give it: in parts, if it is still the one that was begun.
fn file(seen: &Seen, bytes: &[u8], etag: &str) -> Answer {
    let start =
        seen.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let same = seen.header("if-range").is_none_or(|tag| tag == etag);
    match start.filter(|_| same) {
        Some(start) if start >= bytes.len() => {
            Answer::new(416, "").with("Content-Range", format!("bytes */{}", bytes.len()))
        }
        Some(start) => Answer::new(206, &bytes[start..])
            .with("ETag", etag)
            .with("Content-Range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len())),
        None => Answer::new(200, bytes).with("ETag", etag),
    }
}

struct Server {
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// A server; `answer` is told a request and how many there were before.
    fn new(answer: impl Fn(&Seen, usize) -> Answer + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, answer) = (seen.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &log, &*answer));
            }
        });
        Server { port, seen }
    }

    fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn requests(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// The `Range` of each request for a file.
    fn ranges(&self) -> Vec<Option<String>> {
        let files = self.requests().into_iter().filter(|seen| !seen.path.starts_with("/api/"));
        files.map(|seen| seen.header("range").map(str::to_string)).collect()
    }
}

fn serve(stream: TcpStream, log: &Mutex<Vec<Seen>>, answer: &dyn Fn(&Seen, usize) -> Answer) {
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let headers = lines.by_ref().take_while(|line| !line.is_empty());
    let headers =
        headers.filter_map(|line| line.split_once(": ").map(|(n, v)| (n.to_lowercase(), v.to_string())));
    let seen = Seen { path: first.split(' ').nth(1).unwrap().to_string(), headers: headers.collect() };
    let before = {
        let mut log = log.lock().unwrap();
        log.push(seen.clone());
        log.len() - 1
    };
    let answer = answer(&seen, before);
    let mut head =
        format!("HTTP/1.1 {} x\r\nConnection: close\r\nContent-Length: {}\r\n", answer.status, answer.length);
    answer.headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    // A client that has enough may be gone.
    let _ = (&stream).write_all((head + "\r\n").as_bytes());
    let _ = (&stream).write_all(&answer.body);
    if answer.hold {
        let _ = BufReader::new(&stream).lines().count();
    }
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(repository("crates/gguf/tests/fixtures").join(name)).unwrap()
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An entry of the hub's list.
fn entry(path: &str, bytes: &[u8]) -> Value {
    json!({"type": "file", "path": path, "size": bytes.len(), "lfs": {"oid": hash(bytes), "size": bytes.len()}})
}

fn prepare(server: &Server, args: &[&str], to: &Folder) -> Command {
    let to = to.0.display().to_string();
    let mut command = command(&[&["pull", "--retry-delay", "0", "--to", &to][..], args].concat());
    for proxy in ["http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(proxy).env_remove(proxy.to_uppercase());
    }
    command.env("HF_ENDPOINT", server.address()).env("HF_TOKEN", "secret");
    command
}

fn pull(server: &Server, args: &[&str], to: &Folder) -> Output {
    prepare(server, args, to).output().unwrap()
}

/// What `--json` says of a download that must succeed.
fn pulled(server: &Server, args: &[&str], to: &Folder) -> Value {
    let output = pull(server, &[args, &["--json"]].concat(), to);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// What is said of a download that must fail.
fn refused(server: &Server, args: &[&str], to: &Folder) -> String {
    let output = pull(server, args, to);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}{}", stdout(&output), stderr(&output));
    stderr(&output)
}

fn names(folder: &Folder) -> Vec<String> {
    let mut names: Vec<String> =
        folder.0.read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A repository of two models, one of them in shards and in a folder, listed in two parts.
fn hub() -> Server {
    let shard = |number: u64| fixture(&format!("split-0000{number}-of-00003.gguf"));
    Server::new(move |seen, _| match seen.path.as_str() {
        "/api/models/a/b-GGUF/tree/main?recursive=true" => {
            let list = json!([{"type": "directory", "path": "x"}, entry("M-Q8_0.gguf", &fixture("values.gguf")),
                entry("README.md", b"x"), entry("x/M-Q4_K-00003-of-00003.gguf", &shard(3))]);
            Answer::new(200, list.to_string())
                .with("Link", "</api/models/a/b-GGUF/tree/main?cursor=1>; rel=\"next\"")
        }
        "/api/models/a/b-GGUF/tree/main?cursor=1" => {
            let list = json!([
                entry("x/M-Q4_K-00001-of-00003.gguf", &shard(1)),
                entry("x/M-Q4_K-00002-of-00003.gguf", &shard(2))
            ]);
            Answer::new(200, list.to_string())
        }
        "/a/b-GGUF/resolve/main/M-Q8_0.gguf" => file(seen, &fixture("values.gguf"), "\"v\""),
        path => {
            match path.strip_prefix("/a/b-GGUF/resolve/main/x/M-Q4_K-0000").and_then(|p| p[..1].parse().ok())
            {
                Some(number) => file(seen, &shard(number), "\"s\""),
                None => Answer::new(404, "no"),
            }
        }
    })
}

#[test]
fn a_model_comes_whole_and_only_once() {
    let (server, folder) = (hub(), Folder::new("pull-whole"));
    let output = pull(&server, &["a/b-GGUF:q8_0"], &folder);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let path = folder.file("M-Q8_0.gguf");
    assert_eq!(stdout(&output), format!("redlite run {path} -p \"Hello\"\n"));
    assert!(
        stderr(&output).contains("verified") && stderr(&output).contains("cannot run it"),
        "{}",
        stderr(&output)
    );
    assert_eq!(std::fs::read(&path).unwrap(), fixture("values.gguf"));
    assert_eq!(names(&folder), ["M-Q8_0.gguf"]);
    let again = pulled(&server, &["a/b-GGUF:M-Q8_0.gguf"], &folder);
    assert_eq!(again["files"][0]["resumed_from"], 1472);
    assert_eq!(again["files"][0]["sha256"], hash(&fixture("values.gguf")));
    assert_eq!(server.ranges(), [None], "one file, one request");
    assert!(server.requests().iter().all(|seen| seen.header("authorization") == Some("Bearer secret")));
    // Something else of that name is not written over.
    std::fs::write(&path, "mine").unwrap();
    assert!(refused(&server, &["a/b-GGUF:Q8_0"], &folder).contains("is another file"));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(names(&folder), ["M-Q8_0.gguf"]);
}

#[test]
fn what_appears_meanwhile_is_not_written_over() {
    let folder = Folder::new("pull-meanwhile");
    let path = folder.0.join("m.gguf");
    let theirs = path.clone();
    let server = Server::new(move |seen, _| {
        std::fs::write(&theirs, "theirs").unwrap();
        file(seen, &fixture("values.gguf"), "\"v\"")
    });
    let said = refused(&server, &[&format!("{}/m.gguf", server.address())], &folder);
    assert!(said.contains("is another file"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
}

#[test]
fn all_shards_come() {
    let (server, folder) = (hub(), Folder::new("pull-split"));
    let value = pulled(&server, &["a/b-GGUF:Q4_K"], &folder);
    assert_eq!(value["files"].as_array().unwrap().len(), 3);
    assert_eq!(value["model"], folder.file("M-Q4_K-00001-of-00003.gguf"));
    assert_eq!(gguf::Gguf::open(&folder.0).unwrap().shards().len(), 3);
    // By the address of any of them, or of its page.
    let folder = Folder::new("pull-split-url");
    let url = format!("{}/a/b-GGUF/blob/main/x/M-Q4_K-00002-of-00003.gguf?download=true", server.address());
    assert_eq!(pulled(&server, &[&url], &folder)["files"].as_array().unwrap().len(), 3);
    assert_eq!(names(&folder).len(), 3);
}

#[test]
fn what_is_meant_must_be_clear() {
    let (server, folder) = (hub(), Folder::new("pull-choice"));
    let said = refused(&server, &["a/b-GGUF"], &folder);
    assert!(said.contains("2 models; choose one:\n  M-Q4_K  768 B\n  M-Q8_0  1.44 KiB"), "{said}");
    assert!(refused(&server, &["a/b-GGUF:Q2_K"], &folder).contains("no `Q2_K`"));
    assert!(refused(&server, &["b-GGUF"], &folder).contains("expected OWNER/REPO"));
    assert!(refused(&server, &["ftp://x/y.gguf"], &folder).contains("only https and http"));
    assert!(refused(&server, &["a/c"], &folder).contains("404, there is no such file or repository"));
    let two = ["a/b-GGUF:Q4_K", "--sha256", &"0".repeat(64)];
    assert!(refused(&server, &two, &folder).contains("these are 3"));
}

#[test]
fn a_broken_connection_is_taken_up_where_it_broke() {
    let server = Server::new(|seen, before| match before {
        0 => file(seen, &fixture("values.gguf"), "\"v\"").cut(700),
        1 => Answer::new(503, "busy").with("Retry-After", 0),
        2 => file(seen, &fixture("values.gguf"), "\"v\"").cut(100),
        _ => file(seen, &fixture("values.gguf"), "\"v\""),
    });
    let folder = Folder::new("pull-broken");
    let value = pulled(&server, &[&format!("{}/m.gguf", server.address()), "--retries", "2"], &folder);
    assert_eq!(std::fs::read(folder.0.join("m.gguf")).unwrap(), fixture("values.gguf"));
    assert_eq!(
        (&value["files"][0]["resumed_from"], &value["files"][0]["verified"]),
        (&json!(0), &json!(false))
    );
    let from = |at: usize| Some(format!("bytes={at}-"));
    assert_eq!(server.ranges(), [None, from(700), from(700), from(800)]);
    let conditions: Vec<_> =
        server.requests().iter().map(|seen| seen.header("if-range").map(str::to_string)).collect();
    assert_eq!(conditions[1..], vec![Some("\"v\"".to_string()); 3], "the rest of the same file is asked for");
    assert_eq!(names(&folder), ["m.gguf"]);
}

#[test]
fn a_later_run_goes_on_with_the_part() {
    let bytes = fixture("values.gguf");
    let server = Server::new(|seen, before| match before {
        0 => file(seen, &fixture("values.gguf"), "\"v\"").cut(1000),
        _ => file(seen, &fixture("values.gguf"), "\"v\""),
    });
    let (folder, url) = (Folder::new("pull-later"), format!("{}/m.gguf", server.address()));
    let said = refused(&server, &[&url, "--retries", "0"], &folder);
    assert!(said.contains("/m.gguf: "), "{said}");
    assert_eq!(names(&folder), ["m.gguf.part", "m.gguf.part.json"]);
    let value = pulled(&server, &[&url, "--sha256", &hash(&bytes)], &folder);
    assert_eq!(
        (&value["files"][0]["resumed_from"], &value["files"][0]["verified"]),
        (&json!(1000), &json!(true))
    );
    assert_eq!(std::fs::read(folder.0.join("m.gguf")).unwrap(), bytes);
    // A part that is complete already: there is no rest to ask for.
    let folder = Folder::new("pull-complete");
    let note = json!({"validator": "\"v\"", "size": bytes.len()}).to_string();
    folder.write("m.gguf.part", &bytes);
    folder.write("m.gguf.part.json", note);
    assert_eq!(pulled(&server, &[&url], &folder)["files"][0]["resumed_from"], 1472);
    // A part that nothing is known of is begun again.
    let folder = Folder::new("pull-unknown");
    folder.write("m.gguf.part", "GGUF of somebody");
    assert_eq!(pulled(&server, &[&url], &folder)["files"][0]["resumed_from"], 0);
    assert_eq!(std::fs::read(folder.0.join("m.gguf")).unwrap(), bytes);
}

#[test]
fn a_file_that_has_changed_is_read_anew() {
    // One server minds `If-Range`, the other gives the rest of the new file.
    for minds in [true, false] {
        let server = Server::new(move |seen, before| match (before, minds) {
            (0, _) => file(seen, &fixture("values.gguf"), "\"old\"").cut(100),
            (_, true) => file(seen, &fixture("unknown.gguf"), "\"new\""),
            (_, false) => {
                let mut seen = seen.clone();
                seen.headers.remove("if-range");
                file(&seen, &fixture("unknown.gguf"), "\"new\"")
            }
        });
        let folder = Folder::new(&format!("pull-changed-{minds}"));
        let value = pulled(&server, &[&format!("{}/m.gguf", server.address())], &folder);
        assert_eq!(std::fs::read(folder.0.join("m.gguf")).unwrap(), fixture("unknown.gguf"), "{minds}");
        assert_eq!(value["files"][0]["bytes"], 288);
    }
    // The hub has another file under the name by the next day.
    let server = hub();
    let folder = Folder::new("pull-changed-hub");
    folder.write("M-Q8_0.gguf.part", "GGUF, but of yesterday");
    folder.write("M-Q8_0.gguf.part.json", json!({"sha256": hash(b"yesterday"), "size": 1472}).to_string());
    assert_eq!(pulled(&server, &["a/b-GGUF:Q8_0"], &folder)["files"][0]["resumed_from"], 0);
    assert_eq!(server.ranges(), [None]);
}

#[test]
fn a_wrong_hash_leaves_nothing() {
    let server = Server::new(|seen, _| match seen.path.starts_with("/api/") {
        true => Answer::new(200, json!([entry("m.gguf", &[7; 1472])]).to_string()),
        false => file(seen, &fixture("values.gguf"), "\"v\""),
    });
    let folder = Folder::new("pull-hash");
    let said = refused(&server, &["a/b"], &folder);
    assert!(said.contains(&hash(&fixture("values.gguf"))) && said.contains(&hash(&[7; 1472])), "{said}");
    assert!(names(&folder).is_empty());
    let url = format!("{}/m.gguf", server.address());
    assert!(refused(&server, &[&url, "--sha256", &"0".repeat(64)], &folder).contains("SHA-256 is"));
    assert!(names(&folder).is_empty());
    assert!(refused(&server, &["a/b", "--sha256", &"0".repeat(64)], &folder).contains("the server says"));
    assert!(refused(&server, &["a/b", "--sha256", "0"], &folder).contains("64 hexadecimal digits"));
}

#[test]
fn the_token_goes_to_nobody_else() {
    let store = Server::new(|seen, _| file(seen, &fixture("values.gguf"), "\"other\""));
    let elsewhere = format!("http://localhost:{}/blob?signature=1", store.port);
    let server = Server::new(move |seen, _| match seen.path.as_str() {
        "/a/b/resolve/main/m.gguf" => Answer::new(307, "").with("Location", "/moved/m.gguf"),
        "/moved/m.gguf" => Answer::new(302, "")
            .with("Location", &elsewhere)
            .with("X-Linked-ETag", format!("\"{}\"", hash(&fixture("values.gguf")))),
        _ => Answer::new(200, json!([{"type": "file", "path": "m.gguf", "size": 1472}]).to_string()),
    });
    let folder = Folder::new("pull-token");
    let value = pulled(&server, &["a/b"], &folder);
    assert_eq!(value["files"][0]["verified"], true, "by the hash that the redirect told");
    assert!(server.requests().iter().all(|seen| seen.header("authorization") == Some("Bearer secret")));
    assert_eq!(store.requests().len(), 1);
    assert_eq!(store.requests()[0].header("authorization"), None);
    assert_eq!(store.requests()[0].header("host"), Some(&*format!("localhost:{}", store.port)));
    // Nor with an address of somebody else's in the first place.
    let folder = Folder::new("pull-token-url");
    pulled(&server, &[&format!("{}/m.gguf", store.address())], &folder);
    assert!(store.requests().iter().all(|seen| seen.header("authorization").is_none()));
    // Redirects come to an end.
    let endless = Server::new(|_, _| Answer::new(302, "").with("Location", "/m.gguf"));
    let url = format!("{}/m.gguf", endless.address());
    assert!(refused(&endless, &[&url], &folder).contains("too many redirects"));
}

#[test]
fn refusals_are_explained() {
    let folder = Folder::new("pull-refused");
    for (status, tries, words) in [
        (401, 1, "set HF_TOKEN"),
        (403, 1, "accept the model's terms"),
        (404, 1, "check the name"),
        (410, 1, "the server refuses"),
        (416, 1, "less of the file"),
        (429, 3, "too many requests"),
        (500, 3, "in trouble"),
        (503, 3, "in trouble"),
    ] {
        let server = Server::new(move |_, _| Answer::new(status, "no").with("Retry-After", 0));
        let url = format!("{}/m.gguf", server.address());
        let said = refused(&server, &[&url, "--retries", "2"], &folder);
        assert!(said.contains(&format!(": {status}, ")) && said.contains(words), "{said}");
        assert_eq!(server.requests().len(), tries, "{status}");
    }
    let page = Server::new(|_, _| Answer::new(200, "<html>").with("Content-Type", "text/html"));
    let said = refused(&page, &[&format!("{}/page.gguf", page.address())], &folder);
    assert!(said.contains("no GGUF file (text/html)"), "{said}");
    assert!(!folder.0.join("page.gguf.part").exists());
    let large = json!([{"type": "file", "path": "large.gguf", "size": 1u64 << 60}]).to_string();
    let server = Server::new(move |_, _| Answer::new(200, large.as_str()));
    let said = refused(&server, &["a/b"], &folder);
    assert!(said.contains("1048576.00 TiB are needed"), "{said}");
    assert_eq!(server.requests().len(), 1, "the list only");
    let odd = Server::new(|_, _| Answer::new(200, "{\"error\": 1}"));
    assert!(refused(&odd, &["a/b"], &folder).contains("makes no sense"));
    // A part that another process writes.
    let part = std::fs::File::create(folder.0.join("m.gguf.part")).unwrap();
    part.lock().unwrap();
    let server = Server::new(|seen, _| file(seen, &fixture("values.gguf"), "\"v\""));
    let url = format!("{}/m.gguf", server.address());
    assert!(refused(&server, &[&url], &folder).contains("another download is writing it"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_part_to_go_on_with() {
    let pocket = std::fs::read(common::pocket()).unwrap();
    let whole = pocket.clone();
    // Half of it, then nothing more, and nobody hangs up.
    let server = Server::new(move |seen, before| match before {
        0 => Answer { hold: true, ..file(seen, &whole, "\"p\"").cut(whole.len() / 2) },
        _ => file(seen, &whole, "\"p\""),
    });
    let (folder, url) = (Folder::new("pull-interrupt"), format!("{}/pocket.gguf", server.address()));
    let mut command = prepare(&server, &[&url], &folder);
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let part = folder.0.join("pocket.gguf.part");
    while part.metadata().map_or(0, |file| file.len()) < 1 << 20 {
        assert_eq!(process.try_wait().unwrap(), None, "it must not end by itself");
        std::thread::yield_now();
    }
    let id = process.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = process.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("the same command goes on from here"), "{}", stderr(&output));
    let value = pulled(&server, &[&url], &folder);
    assert!(value["files"][0]["resumed_from"].as_u64() >= Some(1 << 20), "{value}");
    assert!(std::fs::read(folder.0.join("pocket.gguf")).unwrap() == pocket);
}
