//! `redlite chat` at a terminal: typing, and Ctrl-C.

#![cfg(unix)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Child;

use common::{Folder, command, pocket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// How long to wait for what must come before the test fails.
const PATIENCE: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// A program and the other end of its terminal.
struct Terminal {
    process: Child,
    master: File,
    /// Shown, but not looked at: bytes, since a read may end inside a character.
    shown: Vec<u8>,
}

impl Terminal {
    fn new(args: &[&str], state: &Folder) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let end = || {
            let path = std::path::Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
            File::options().read(true).write(true).open(path).unwrap()
        };
        let mut command = command(args);
        command.env("TERM", "xterm").env("NO_COLOR", "1").env("XDG_STATE_HOME", &state.0);
        command.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: the closure calls two functions of the system that are safe between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        Terminal { process: command.spawn().unwrap(), master: master.into(), shown: Vec::new() }
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Looks until `words` are shown, and no further.
    fn wait_for(&mut self, words: &str) {
        let mut bytes = [0; 32];
        loop {
            if let Some(at) = self.shown.windows(words.len()).position(|shown| shown == words.as_bytes()) {
                self.shown.drain(..at + words.len());
                return;
            }
            let mut ready = [PollFd::new(&self.master, PollFlags::IN)];
            let shown = || String::from_utf8_lossy(&self.shown);
            assert_ne!(poll(&mut ready, Some(&PATIENCE)).unwrap(), 0, "no `{words}` in: {}", shown());
            let read = (&self.master).read(&mut bytes).unwrap_or(0);
            assert_ne!(read, 0, "it has ended without `{words}`: {}", shown());
            self.shown.extend(&bytes[..read]);
        }
    }

    /// The exit code, once everything is shown.
    fn ends(mut self) -> Option<i32> {
        let mut rest = Vec::new();
        // Where the other end has gone, some systems say so with an error.
        let _ = self.master.read_to_end(&mut rest);
        self.process.wait().unwrap().code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Where a test has failed it is still there.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn ctrl_c_stops_the_answer_and_the_conversation_goes_on() {
    let folder = Folder::new("terminal-answer");
    let (path, model) = (folder.file("talk.json"), pocket());
    // Nearly any token at any place: an answer longer than the terminal holds, so that it cannot end unseen.
    let wild =
        ["--temp", "100", "--top-k", "0", "--top-p", "1", "--seed", "1", "-n", "4000", "--context", "6000"];
    let mut terminal = Terminal::new(&[&["chat", &model][..], &wild].concat(), &folder);
    terminal.wait_for("/help lists the commands");
    terminal.wait_for("> ");
    // A line given up before it is said.
    terminal.press("not this\x03");
    terminal.wait_for("> ");
    terminal.press("Talk \\\r");
    terminal.wait_for("… ");
    terminal.press("a lot.\r");
    terminal.wait_for("a lot.");
    terminal.wait_for("\n");
    terminal.wait_for("e");
    terminal.press("\x03");
    terminal.wait_for("stopped; what was written is part of the conversation");
    terminal.wait_for("> ");
    terminal.press("More.\r");
    terminal.wait_for("More.");
    terminal.wait_for("\n");
    terminal.wait_for("e");
    terminal.press("\x03");
    terminal.wait_for("stopped; what was written is part of the conversation");
    terminal.wait_for("> ");
    terminal.press("/stats\r");
    terminal.wait_for("(interrupted)");
    terminal.wait_for("in 2 turns");
    terminal.wait_for("> ");
    terminal.press(&format!("/save {path}\r"));
    terminal.wait_for("4 messages");
    terminal.wait_for("> ");
    terminal.press("\x04");
    assert_eq!(terminal.ends(), Some(0));
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(saved[0]["content"], "Talk \na lot.");
    assert!(!saved[1]["content"].as_str().unwrap().is_empty());
    assert_eq!(saved[2]["content"], "More.");
    // What was typed is there the next time.
    let history = std::fs::read_to_string(folder.0.join("redlite/chat-history")).unwrap();
    assert!(
        history.contains("/stats") && history.contains("More.") && !history.contains("not this"),
        "{history}"
    );
}

#[test]
fn ctrl_c_stops_the_reading_and_the_message_is_taken_back() {
    let folder = Folder::new("terminal-reading");
    let (path, model) = (folder.file("talk.json"), pocket());
    let text = folder.write("long.txt", "def is_sorted(items): return items == sorted(items)\n".repeat(90));
    // The reference takes long enough for somebody to change their mind.
    let args = [
        "chat",
        &model,
        "--no-history",
        "--backend",
        "reference",
        "--context",
        "4096",
        "-n",
        "2",
        "--temp",
        "0",
    ];
    let mut terminal = Terminal::new(&args, &folder);
    terminal.wait_for("> ");
    terminal.press(&format!("/file {text}\r"));
    terminal.wait_for("goes with the next message");
    terminal.wait_for("> ");
    terminal.press("What is it?\r");
    terminal.wait_for("reading");
    terminal.press("\x03");
    terminal.wait_for("stopped; the message is not part of the conversation");
    terminal.wait_for("> ");
    terminal.press("/reset\r");
    terminal.wait_for("a new conversation");
    terminal.wait_for("> ");
    terminal.press("Hello.\r");
    terminal.wait_for("stopped after the most tokens");
    terminal.wait_for("> ");
    terminal.press(&format!("/save {path}\r"));
    terminal.wait_for("2 messages");
    terminal.wait_for("> ");
    terminal.press("/quit\r");
    assert_eq!(terminal.ends(), Some(0));
    assert!(!folder.0.join("redlite").exists(), "no history was wanted");
}
