//! `redlite chat`, the real binary, its input from a pipe.

mod common;

use std::io::Write;
use std::process::Stdio;

use common::{Folder, command, fails, pocket, stderr, stdout};

const FIRST: &str = "Write a Python function `is_sorted`: Return True if the list is sorted.";

/// What a conversation of these lines says on standard output and standard error.
fn talk_with(more: &[&str], lines: &str) -> (String, String) {
    let model = pocket();
    let args = [&["chat", &model, "--temp", "0", "-n", "24", "--context", "2048", "--quiet"], more].concat();
    let mut command = command(&args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    process.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    (stdout(&output), stderr(&output))
}

fn talk(lines: &str) -> (String, String) {
    talk_with(&[], lines)
}

/// Tokens reused and read in each turn that `/stats` told.
fn turns(told: &str) -> Vec<(usize, usize)> {
    let numbers = |line: &str| {
        let words: Vec<&str> = line.split([' ', ',', ':']).filter(|word| !word.is_empty()).collect();
        (words[1].parse().unwrap(), words[4].parse().unwrap())
    };
    told.lines().filter(|line| line.starts_with("reused ")).map(numbers).collect()
}

#[test]
fn each_turn_reads_only_what_is_new() {
    let (said, told) = talk(&format!("{FIRST}\n/stats\nThank \\\nyou.\n/stats\n/quit\nnever said\n"));
    assert!(said.contains("def is_sorted"), "{said}");
    let [(0, first), (reused, read)] = turns(&told)[..] else { panic!("{told}") };
    // The prompt, and all of the answer but the token that ended it.
    assert!(reused >= first && read < first, "{told}");
    assert!(told.contains("all of them new") && told.contains("in 2 turns"), "{told}");
    // The same questions as a conversation of one process each: the answers do not depend on what was reused.
    let folder = Folder::new("chat-same");
    let (one, two) = (folder.file("one.json"), folder.file("two.json"));
    let (first_answer, _) = talk(&format!("{FIRST}\n/save {one}\n"));
    let (second_answer, _) = talk(&format!("/load {one}\nThank \\\nyou.\n/save {two}\n"));
    assert_eq!(said, first_answer + &second_answer);
}

#[test]
fn a_conversation_is_what_the_template_makes_of_its_messages() {
    let folder = Folder::new("chat-save");
    let path = folder.file("talk.json");
    let lines = format!("\"\"\"\n{FIRST}\n/quit\n\"\"\"\n//twice\n/save {path}\n");
    let (_, told) = talk_with(&["--system", "Be brief."], &lines);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let roles: Vec<&str> = saved.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"], "{told}");
    assert_eq!(saved[1]["content"], format!("{FIRST}\n/quit\n"));
    assert_eq!(saved[3]["content"], "/twice");
    // Starting over keeps the system message; what is no conversation is neither read nor written over.
    let other = folder.write("other.json", "precious");
    let lines = format!("/load {path}\n/reset\n/save {path}\n/save {other}\n/load {other}\n/load {path}x\n");
    let (_, told) = talk_with(&["--system", "Be kind."], &lines);
    assert!(told.contains("5 messages") && told.contains("choose another name"), "{told}");
    assert!(told.contains("is no conversation") && told.contains("talk.jsonx"), "{told}");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(saved, serde_json::json!([{"role": "system", "content": "Be kind."}]));
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
}

#[test]
fn files_go_with_the_next_message() {
    let folder = Folder::new("chat-file");
    let (file, path) = (folder.write("a file.py", "x = 1\n````\n"), folder.file("talk.json"));
    let (_, told) = talk(&format!("/file {file}\n/file {file}x\nWhat is x?\nAgain?\n/save {path}\n"));
    assert!(told.contains("a file.py: 11 B") && told.contains("a file.pyx: "), "{told}");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(saved[0]["content"], format!("{file}:\n`````\nx = 1\n````\n`````\n\nWhat is x?"));
    assert_eq!(saved[2]["content"], "Again?");
}

#[test]
fn mistakes_do_not_end_the_conversation() {
    let long = "word ".repeat(3000);
    let (said, told) = talk(&format!("/stast\n/load\n/stats\n{long}\n{FIRST}\n"));
    assert!(told.contains("did you mean /stats?") && told.contains("needs a file"), "{told}");
    assert!(told.contains("nothing has been asked yet") && told.contains("/reset starts over"), "{told}");
    assert!(said.contains("def is_sorted"), "{said}");
    fails(&["chat", "no such file"], 2, &["no such file"]);
    fails(&["chat", &pocket(), "--load", "no such talk"], 2, &["no such talk"]);
    fails(&["chat", &pocket(), "--temp", "-1"], 2, &["temperature"]);
}

#[test]
fn what_was_read_survives_a_restart() {
    let folder = Folder::new("chat-state");
    let (state, path) = (folder.file("state"), folder.file("talk.json"));
    let kept = ["--state-dir", state.as_str()];
    // Sessions shorter than a cell of the grid are not worth a file.
    let long = FIRST.repeat(4);
    let (_, told) = talk_with(&kept, &format!("{long}\n/stats\n/save {path}\n"));
    let [(0, first)] = turns(&told)[..] else { panic!("{told}") };
    let load = [&kept[..], &["--load", path.as_str()]].concat();
    let (_, told) = talk_with(&load, "Thanks.\n/stats\n");
    let [(reused, read)] = turns(&told)[..] else { panic!("{told}") };
    assert!(reused >= first && read < first, "{told}");
}
