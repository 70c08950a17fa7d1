//! Sessions on disk: a restart reads nothing again, and no damage goes unnoticed.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::served::{AMPLE, Heard, ask, scheduler_with, words};
use engine::{Engine, Fingerprint, Miss, Scheduler, SchedulerOptions, Store};
use model::KvType;
use model::state::SnapshotShape;

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("redlite-store-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    /// Files of stored sessions with this ending.
    fn files(&self, ending: &str) -> Vec<PathBuf> {
        let folders =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        let mut files: Vec<PathBuf> = folders
            .flat_map(|folder| fs::read_dir(folder).unwrap())
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == ending))
            .collect();
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open_store(engine: &mut Engine, folder: &Path, template: &str, budget: u64) -> Store {
    let model = engine.model().clone();
    let capabilities = engine.backend().capabilities().clone();
    let fingerprint = Fingerprint::new(&model, Some(template), &capabilities, KvType::F32, folder).unwrap();
    Store::open(folder, fingerprint, SnapshotShape::new(&model.spec, KvType::F32), budget).unwrap()
}

fn server_for(folder: &Path, template: &str, budget: u64) -> Scheduler {
    scheduler_with(AMPLE, SchedulerOptions::default(), |engine| {
        Some(open_store(engine, folder, template, budget))
    })
}

fn server(folder: &Folder) -> Scheduler {
    server_for(&folder.0, "template", AMPLE)
}

fn answer(heard: &Heard) -> Vec<(u32, u32)> {
    heard.log(|log| log.answer.clone())
}

/// A first turn of 1,500 tokens with a message of 600 in front; the history of the second.
fn first_turn(server: &mut Scheduler) -> Vec<u32> {
    let mut history = words(1, 1500);
    history.extend(ask(server, &history, &[600, 1400], 20).ids());
    history.extend(words(2, 30));
    history
}

#[test]
fn after_a_restart_only_what_is_new_is_read() {
    let folder = Folder::new("restart");
    let mut before = server(&folder);
    let history = first_turn(&mut before);
    drop(before);
    assert_eq!(
        (folder.files("state").len(), folder.files("kv").len()),
        (2, 1),
        "the session and its first message"
    );

    let mut restarted = server(&folder);
    let second = ask(&mut restarted, &history, &[], 8);
    assert_eq!(second.read(), 31);
    // The bits of the session nobody interrupted.
    let mut unbroken = scheduler_with(AMPLE, SchedulerOptions::default(), |_| None);
    first_turn(&mut unbroken);
    assert_eq!(answer(&second), answer(&ask(&mut unbroken, &history, &[], 8)));

    // Another conversation with the same first message.
    let mut other = words(1, 1500);
    other.truncate(600);
    other.extend(words(3, 100));
    let mut restarted = server(&folder);
    assert_eq!(ask(&mut restarted, &other, &[600], 1).read(), 700 - 576);
}

/// Two conversations of 4,000 and 3,000 tokens and a request for a title, before and after a restart.
#[test]
fn long_conversations_that_alternate_survive_a_restart() {
    let folder = Folder::new("restart-long");
    let mut histories = [words(1, 4000), words(2, 3000)];
    let mut turn = |server: &mut Scheduler, expected: [usize; 2]| {
        for (history, expected) in histories.iter_mut().zip(expected) {
            let heard = ask(server, history, &[700, history.len() - 100], 10);
            assert_eq!(heard.read(), expected);
            history.extend(heard.ids());
            history.extend(words(7, 25));
            ask(server, &words(9, 200), &[150], 4);
        }
    };
    turn(&mut server(&folder), [4000, 3000]);
    assert_eq!(folder.files("kv").len(), 3 + 2, "full segments, once each");
    let mut restarted = server(&folder);
    turn(&mut restarted, [26, 26]);
    drop(restarted);
    assert_eq!(folder.files("kv").len(), 3 + 2, "the second turns share them");
    turn(&mut server(&folder), [26, 26]);
}

#[test]
fn damage_costs_one_clean_reading() {
    let folder = Folder::new("damage");
    let history = first_turn(&mut server(&folder));
    let expected = {
        let mut cold = scheduler_with(0, SchedulerOptions::default(), |_| None);
        answer(&ask(&mut cold, &history, &[], 4))
    };
    let files: Vec<PathBuf> = folder.files("state").into_iter().chain(folder.files("kv")).collect();
    let whole: Vec<Vec<u8>> = files.iter().map(|path| fs::read(path).unwrap()).collect();
    type Harm = fn(&[u8]) -> Vec<u8>;
    let harms: [Harm; 6] = [
        |bytes| bytes[..bytes.len() - 1].to_vec(),
        |bytes| bytes[..bytes.len() / 2].to_vec(),
        |_| Vec::new(),
        |bytes| flipped(bytes, bytes.len() / 2),
        |bytes| flipped(bytes, 50),
        |bytes| flipped(bytes, bytes.len() - 40),
    ];
    for (number, harm) in harms.into_iter().enumerate() {
        files.iter().zip(&whole).for_each(|(path, bytes)| fs::write(path, harm(bytes)).unwrap());
        let mut restarted = server(&folder);
        let heard = ask(&mut restarted, &history, &[], 4);
        assert_eq!(heard.read(), history.len(), "harm {number}");
        assert_eq!(answer(&heard), expected, "harm {number}");
        let miss = heard.log(|log| log.reuse.unwrap().miss);
        assert!(matches!(miss, Miss::Damaged | Miss::Unknown), "harm {number}: {miss:?}");
        drop(restarted);
        for path in folder.files("state") {
            assert!(!files.contains(&path), "harm {number}: {path:?} is still there");
            fs::remove_file(path).unwrap();
        }
    }
    // Only the segment is damaged: the first message, which is shorter than one, is still good.
    let restore = || files.iter().zip(&whole).for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    restore();
    let segment = files.last().unwrap();
    fs::write(segment, flipped(whole.last().unwrap(), 5000)).unwrap();
    let heard = ask(&mut server(&folder), &history, &[], 4);
    assert_eq!(heard.log(|log| (log.reuse.unwrap().reused, log.reuse.unwrap().miss)), (576, Miss::Damaged));
    assert_eq!(answer(&heard), expected);
    // Whole again, and found again.
    restore();
    assert_eq!(ask(&mut server(&folder), &history, &[], 4).read(), 31);
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[test]
fn sessions_of_others_are_refused() {
    let folder = Folder::new("foreign");
    let history = first_turn(&mut server(&folder));
    let mut other = server_for(&folder.0, "another template", AMPLE);
    assert_eq!(ask(&mut other, &history, &[], 1).read(), history.len());
    drop(other);
    // Nor do they help when they lie in the wrong folder.
    let all = folder.files("state");
    let folders: Vec<&Path> = all.iter().map(|path| path.parent().unwrap()).collect();
    let (ours, theirs) = (folders[0], *folders.iter().find(|path| **path != folders[0]).unwrap());
    let foreign: Vec<&PathBuf> = all.iter().filter(|path| path.parent().unwrap() == theirs).collect();
    for path in &foreign {
        fs::copy(path, ours.join(path.file_name().unwrap())).unwrap();
    }
    fs::write(ours.join("half.tmp"), b"half").unwrap();
    fs::write(ours.join("0000.kv"), b"nobody's").unwrap();
    for template in ["template", "another template"] {
        drop(server_for(&folder.0, template, AMPLE));
    }
    assert!(foreign.iter().all(|path| !ours.join(path.file_name().unwrap()).exists()));
    assert!(folder.files("tmp").is_empty() && !ours.join("0000.kv").exists());
}

#[test]
fn the_budget_on_disk_holds() {
    let folder = Folder::new("budget");
    let budget = 12 << 20;
    for client in 0..4 {
        let mut server = server_for(&folder.0, "template", budget);
        ask(&mut server, &words(client, 1200), &[], 2);
    }
    let bytes =
        |ending| folder.files(ending).iter().map(|path| fs::metadata(path).unwrap().len()).sum::<u64>();
    let all = bytes("state") + bytes("kv");
    assert!(all > 0 && all <= budget, "{all} bytes");
    let mut last = words(3, 1200);
    let mut server = server_for(&folder.0, "template", budget);
    last.extend(ask(&mut server, &last.clone(), &[], 2).ids());
    last.push(9);
    assert_eq!(
        ask(&mut server_for(&folder.0, "template", budget), &last, &[], 1).read(),
        2,
        "the newest is there"
    );
}
