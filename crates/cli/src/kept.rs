//! Sessions on disk, for the commands that keep them.

use std::path::Path;

use engine::{Engine, Fingerprint, Store};
use model::KvType;
use model::state::SnapshotShape;

use crate::failure::Failure;
use crate::report;

/// The sessions in `folder`, at most so many bytes of them, that belong to the model of `engine` and its template.
///
/// # Errors
/// If the folder cannot be used.
pub fn store(
    engine: &mut Engine,
    (folder, budget): (&Path, u64),
    template: Option<&str>,
    kv: KvType,
    quiet: bool,
) -> Result<Store, Failure> {
    let fail = |source| Failure::File { path: folder.to_path_buf(), source };
    let model = engine.model().clone();
    let capabilities = engine.backend().capabilities().clone();
    let fingerprint = Fingerprint::new(&model, template, &capabilities, kv, folder).map_err(fail)?;
    let store =
        Store::open(folder, fingerprint, SnapshotShape::new(&model.spec, kv), budget).map_err(fail)?;
    if !quiet {
        let (sessions, bytes) = store.size();
        report::say(format_args!(
            "redlite: {sessions} sessions in {}, {}",
            folder.display(),
            report::size(bytes)
        ));
    }
    Ok(store)
}
