//! Models of several files: found through any of them, and refused when they do not belong together.

use std::fs;
use std::path::Path;

use gguf::Gguf;

mod common;
use common::{Folder, Raw, id, string};

/// Shard `no` (from zero) of `count`, holding tensors `names`; of `total` in all.
fn shard(no: u16, count: u16, total: i32, names: &[&str]) -> Raw {
    let mut raw = Raw::empty();
    if no == 0 {
        raw = raw.entry("general.architecture", id::STRING, &string("test"));
    }
    raw = raw
        .entry("split.no", id::U16, &no.to_le_bytes())
        .entry("split.count", id::U16, &count.to_le_bytes())
        .entry("split.tensors.count", id::I32, &total.to_le_bytes());
    for (i, name) in names.iter().enumerate() {
        raw = raw.tensor(name, &[1], 0, 32 * i as u64);
    }
    let mut raw = raw.data(32 * names.len());
    raw.data.fill(no as u8 + 1);
    raw
}

fn name(number: usize) -> String {
    format!("m-{number:05}-of-00003.gguf")
}

/// Shards of a good set; the first has no tensors, as some tools write it.
fn good() -> [Raw; 3] {
    [shard(0, 3, 3, &[]), shard(1, 3, 3, &["a", "b"]), shard(2, 3, 3, &["c"])]
}

fn folder(test: &str, shards: &[Raw]) -> Folder {
    let folder = Folder::new(&format!("split-{test}"));
    for (i, shard) in shards.iter().enumerate() {
        folder.file(&name(i + 1), &shard.bytes());
    }
    folder
}

/// The error of opening a set through its n-th file.
fn refusal(folder: &Folder, number: usize) -> String {
    error(folder, &folder.join(&name(number)))
}

/// The error of opening `path`, without the folder in it.
fn error(folder: &Folder, path: &Path) -> String {
    let text = Gguf::open(path).unwrap_err().to_string();
    text.replace(&format!("{}/", folder.0.display()), "").replace(&folder.0.display().to_string(), "FOLDER")
}

fn assert_good(model: &Gguf) {
    let found: Vec<_> =
        model.tensors().iter().map(|t| (t.name.as_str(), t.shard, model.bytes(t)[0])).collect();
    assert_eq!(found, [("a", 1, 2), ("b", 1, 2), ("c", 2, 3)]);
    assert_eq!(model.shards().len(), 3);
    let keys: Vec<_> = model.metadata().iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["general.architecture"], "the first shard's, without what describes files");
    assert_eq!(model.tensor("c").unwrap().name, "c");
}

#[test]
fn any_shard_and_the_folder_open_the_same_model() {
    let folder = folder("any", &good());
    for number in 1..=3 {
        assert_good(&Gguf::open(&folder.join(&name(number))).unwrap());
    }
    folder.file("README.md", b"not a model");
    folder.file(".hidden.gguf", b"not a model");
    assert_good(&Gguf::open(&folder.0).unwrap());
}

#[test]
fn metadata_decides_the_order_not_the_names() {
    let [first, second, third] = good();
    let folder = folder("order", &[third, first, second]);
    for number in 1..=3 {
        assert_good(&Gguf::open(&folder.join(&name(number))).unwrap());
    }
}

#[test]
fn a_whole_model_may_be_named_like_a_shard() {
    let folder = folder("whole", &[Raw::small()]);
    assert_eq!(Gguf::open(&folder.join(&name(1))).unwrap().tensors().len(), 2);
    assert_eq!(Gguf::open(&folder.0).unwrap().tensors().len(), 2);
    // A merged file keeps `split.count` as 0.
    folder.file("m-00001-of-00003.gguf", &shard(0, 0, 1, &["a"]).bytes());
    assert_eq!(Gguf::open(&folder.0).unwrap().tensors().len(), 1);
    // Two of them are two models.
    folder.file("m-00002-of-00003.gguf", &Raw::small().bytes());
    assert_eq!(
        error(&folder, &folder.0),
        "FOLDER: several models in this folder, so name one: m-00001-of-00003.gguf, m-00002-of-00003.gguf"
    );
}

#[test]
fn a_missing_shard_is_named() {
    let folder = folder("missing", &good());
    fs::remove_file(folder.join(&name(2))).unwrap();
    for opened in [1, 3] {
        assert_eq!(
            refusal(&folder, opened),
            format!("{}: shard 2 of 3 is missing: expected the file m-00002-of-00003.gguf", name(opened))
        );
    }
    assert!(error(&folder, &folder.0).contains("shard 2 of 3 is missing"));
}

#[test]
fn a_renamed_shard_cannot_find_the_others() {
    let folder = folder("renamed", &good());
    fs::rename(folder.join(&name(1)), folder.join("model.gguf")).unwrap();
    assert_eq!(
        error(&folder, &folder.join("model.gguf")),
        "model.gguf: `split.count` says this is one of 3 shards, so its name must end in \
         -00001-of-00003.gguf (with its own number) for the others to be found"
    );
}

#[test]
fn shards_that_disagree_on_their_number_are_refused() {
    let [first, second, _] = good();
    let folder = folder("count", &[first, second, shard(2, 4, 3, &["c"])]);
    assert_eq!(
        refusal(&folder, 1),
        "m-00003-of-00003.gguf: `split.count` is 4, but m-00001-of-00003.gguf says 3; put the shards of one \
         model together"
    );
    assert_eq!(
        refusal(&folder, 3),
        "m-00003-of-00003.gguf: `split.count` is 4, but its name says 3; put the shards of one model together"
    );
}

#[test]
fn a_file_that_is_no_shard_is_refused_among_shards() {
    let [first, second, _] = good();
    let folder = folder("stranger", &[first, second, Raw::small()]);
    assert_eq!(
        refusal(&folder, 1),
        "m-00003-of-00003.gguf: `split.count` is 0, but m-00001-of-00003.gguf says 3; put the shards of one \
         model together"
    );
}

#[test]
fn two_shards_of_one_number_are_refused() {
    let [first, second, _] = good();
    let folder = folder("twice", &[first, second, shard(1, 3, 3, &["c"])]);
    assert_eq!(
        refusal(&folder, 1),
        "m-00003-of-00003.gguf: `split.no` is 1, as in m-00002-of-00003.gguf; each shard of a set has its own"
    );
}

#[test]
fn a_shard_number_beyond_the_count_or_absent_is_refused() {
    let [first, second, _] = good();
    let beyond = folder("beyond", &[first.clone(), second.clone(), shard(3, 3, 3, &["c"])]);
    assert_eq!(
        refusal(&beyond, 1),
        "m-00003-of-00003.gguf: `split.no` is 3, where a set of 3 shards has 0 to 2"
    );
    let absent = Raw::empty().entry("split.count", id::U16, &3u16.to_le_bytes());
    let absent = folder("absent", &[first, second, absent]);
    assert_eq!(
        refusal(&absent, 1),
        "m-00003-of-00003.gguf: `split.no` is absent, where a set of 3 shards has 0 to 2"
    );
}

#[test]
fn the_number_of_tensors_is_that_of_all_shards() {
    let [first, second, _] = good();
    let folder = folder("total", &[first, second, shard(2, 3, 4, &["c"])]);
    assert_eq!(
        refusal(&folder, 2),
        "m-00003-of-00003.gguf: `split.tensors.count` is 4, but the shards hold 3 tensors; shards of different \
         models?"
    );
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let [first, second, _] = good();
    let folder = folder("duplicate", &[first, second, shard(2, 3, 3, &["b"])]);
    assert_eq!(
        refusal(&folder, 1),
        "m-00003-of-00003.gguf: tensor `b` occurs twice, here and in m-00002-of-00003.gguf; shards of different \
         models?"
    );
}

#[test]
fn a_broken_shard_is_named() {
    let folder = folder("broken", &good());
    folder.file(&name(3), b"GGUF");
    assert!(refusal(&folder, 1).starts_with("m-00003-of-00003.gguf: the version at byte 4 needs 4 bytes"));
    let [first, second, third] = good();
    let negative = Raw::empty().entry("split.count", id::I32, &(-3i32).to_le_bytes());
    let folder = self::folder("negative", &[first, second, negative]);
    assert_eq!(
        refusal(&folder, 3),
        "m-00003-of-00003.gguf: metadata key `split.count` is -3, which does not fit u64"
    );
    let error = Gguf::from_bytes(third.bytes()).unwrap_err().to_string();
    assert_eq!(error, "(memory): a shard of 3 cannot be opened alone; open it as a file, beside the others");
}

#[test]
fn a_folder_holds_exactly_one_model() {
    let folder = Folder::new("split-folder");
    assert_eq!(error(&folder, &folder.0), "FOLDER: no .gguf file in this folder");
    folder.file("one.gguf", &Raw::small().bytes());
    assert_eq!(Gguf::open(&folder.0).unwrap().tensors().len(), 2);
    for (i, shard) in good().iter().enumerate() {
        folder.file(&name(i + 1), &shard.bytes());
    }
    assert!(error(&folder, &folder.0).ends_with(
        "several models in this folder, so name one: m-00001-of-00003.gguf, m-00002-of-00003.gguf, \
         m-00003-of-00003.gguf, one.gguf"
    ));
}

#[cfg(unix)]
#[test]
fn devices_are_refused() {
    let error = Gguf::open(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(error.starts_with("/dev/zero: not a regular file"), "{error}");
}
