//! The file being written: planned tensors go in, in order, and the summary comes out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gguf::{Metadata, TensorDecl, Value, Writer};
use quant::Type;
use rayon::prelude::*;

use crate::error::Error;
use crate::mix::{file_type, fit};
use crate::progress::{Meter, OnProgress};
use crate::summary::{Fallback, Loss, Summary, Tally};
use crate::tensors::Class;

/// Weights of the pieces that tensors are cut into for threads. The cut depends on the tensor alone, so the file
/// does not depend on the number of threads.
const PIECE: usize = 1 << 15;

/// Pieces in flight for every thread: enough to keep threads busy, few enough to answer a cancellation soon.
const PIECES_PER_THREAD: usize = 4;

/// A tensor of the file to come.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) name: String,
    pub(crate) class: Class,
    /// Fastest first.
    pub(crate) dims: Vec<u64>,
    pub(crate) ty: Type,
    /// The type asked for, where the rows do not fit it.
    wanted: Option<Type>,
}

impl Planned {
    /// Plans a tensor of type `wanted`, or of the type its rows do fit.
    pub(crate) fn new(name: String, class: Class, dims: Vec<u64>, wanted: Type) -> Planned {
        let ty = fit(wanted, dims[0]);
        Planned { name, class, dims, ty, wanted: (ty != wanted).then_some(wanted) }
    }

    /// Weights of a row.
    pub(crate) fn columns(&self) -> usize {
        self.dims[0] as usize
    }

    /// Number of weights.
    pub(crate) fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.elements() / self.ty.block_len() as u64 * self.ty.block_bytes() as u64
    }
}

/// The file in progress. Dropped before [`Output::finish`], it leaves nothing behind.
pub(crate) struct Output<'a, 'f> {
    path: PathBuf,
    writer: Writer,
    meter: Meter<'a, 'f>,
    tally: Tally,
    fallbacks: Vec<Fallback>,
}

impl<'a, 'f> Output<'a, 'f> {
    /// Starts a file with these tensors; `metadata` is completed by what follows from their types.
    pub(crate) fn create(
        path: &Path,
        mut metadata: Metadata,
        plan: &[Planned],
        report: &'a mut OnProgress<'f>,
    ) -> Result<Output<'a, 'f>, Error> {
        let mut bytes_of = BTreeMap::new();
        for tensor in plan {
            *bytes_of.entry(tensor.ty).or_default() += tensor.bytes();
        }
        metadata.set("general.quantization_version", Value::U32(2));
        if let Some(number) = file_type(&bytes_of) {
            metadata.set("general.file_type", Value::U32(number));
        }
        let decls: Vec<TensorDecl> = plan
            .iter()
            .map(|tensor| TensorDecl { name: tensor.name.clone(), dims: tensor.dims.clone(), ty: tensor.ty })
            .collect();
        let fallbacks = plan.iter().filter_map(|tensor| {
            let wanted = tensor.wanted?;
            Some(Fallback { tensor: tensor.name.clone(), columns: tensor.dims[0], wanted, used: tensor.ty })
        });
        Ok(Output {
            path: path.to_owned(),
            writer: Writer::create(path, &metadata, &decls)?,
            meter: Meter { done: 0, total: bytes_of.values().sum(), report },
            tally: Tally::default(),
            fallbacks: fallbacks.collect(),
        })
    }

    /// Writes a tensor from bytes that are in its type already.
    pub(crate) fn copy(&mut self, tensor: &Planned, bytes: &[u8]) -> Result<(), Error> {
        const STEP: usize = 8 << 20;
        self.meter.add(0, &tensor.name)?;
        for step in bytes.chunks(STEP) {
            self.writer.write(step)?;
            self.meter.add(step.len() as u64, &tensor.name)?;
        }
        self.tally.add(tensor.class, tensor.ty, tensor.elements(), tensor.bytes(), None);
        Ok(())
    }

    /// Writes a tensor by encoding its rows in parallel. `read` fills whole rows from the given row on.
    pub(crate) fn encode<R>(&mut self, tensor: &Planned, read: R) -> Result<(), Error>
    where
        R: Fn(u64, &mut [f32]) -> Result<(), Error> + Sync,
    {
        let columns = tensor.columns();
        let piece_rows = (PIECE / columns).max(1) as u64;
        let rows = tensor.elements() / columns as u64;
        // Rounding to 16 bits is what such files are; only block formats lose enough to speak of.
        let measured = tensor.ty.block_len() > 1;
        let mut total = Loss::default();
        self.pieces(
            tensor,
            rows.div_ceil(piece_rows),
            |piece| {
                let first = piece * piece_rows;
                let count = piece_rows.min(rows - first) as usize;
                let mut weights = vec![0.0; count * columns];
                read(first, &mut weights)?;
                encode_rows(tensor, &weights, measured)
            },
            |loss| total.add(loss),
        )?;
        let loss = measured.then_some(total);
        self.tally.add(tensor.class, tensor.ty, tensor.elements(), tensor.bytes(), loss);
        Ok(())
    }

    /// Writes a tensor of bytes that `make` returns piece by piece, each of [`piece_blocks`] blocks.
    pub(crate) fn generate<M>(&mut self, tensor: &Planned, make: M) -> Result<(), Error>
    where
        M: Fn(u64, usize) -> Result<Vec<u8>, Error> + Sync,
    {
        let per_piece = piece_blocks(tensor.ty) as u64;
        let blocks = tensor.elements() / tensor.ty.block_len() as u64;
        self.pieces(
            tensor,
            blocks.div_ceil(per_piece),
            |piece| {
                let count = per_piece.min(blocks - piece * per_piece) as usize;
                Ok((make(piece, count)?, Loss::default()))
            },
            |_| (),
        )?;
        self.tally.add(tensor.class, tensor.ty, tensor.elements(), tensor.bytes(), None);
        Ok(())
    }

    /// Makes pieces `0..count` in parallel and writes them in order: while one batch is written the next is made.
    fn pieces<M>(
        &mut self,
        tensor: &Planned,
        count: u64,
        make: M,
        mut account: impl FnMut(Loss) + Send,
    ) -> Result<(), Error>
    where
        M: Fn(u64) -> Result<(Vec<u8>, Loss), Error> + Sync,
    {
        let batch = (rayon::current_num_threads() * PIECES_PER_THREAD) as u64;
        let make_batch = |first: u64| -> Result<Vec<(Vec<u8>, Loss)>, Error> {
            (first..count.min(first + batch)).into_par_iter().map(&make).collect()
        };
        let (writer, meter) = (&mut self.writer, &mut self.meter);
        meter.add(0, &tensor.name)?;
        let mut made = make_batch(0)?;
        let mut next = batch;
        while !made.is_empty() {
            let write = || -> Result<u64, Error> {
                let mut bytes = 0;
                for (piece, loss) in &made {
                    writer.write(piece)?;
                    bytes += piece.len() as u64;
                    account(*loss);
                }
                Ok(bytes)
            };
            let (written, following) = rayon::join(write, || make_batch(next.min(count)));
            meter.add(written?, &tensor.name)?;
            made = following?;
            next += batch;
        }
        Ok(())
    }

    /// Completes the file and gives it its name.
    pub(crate) fn finish(self) -> Result<Summary, Error> {
        self.writer.finish()?;
        Ok(Summary {
            path: self.path,
            bytes: self.meter.done,
            lines: self.tally.lines(),
            fallbacks: self.fallbacks,
            skipped: Vec::new(),
        })
    }
}

/// Blocks in a generated piece.
pub(crate) fn piece_blocks(ty: Type) -> usize {
    PIECE * 4 / ty.block_len()
}

/// Encodes whole rows, and measures what that loses if asked to.
fn encode_rows(tensor: &Planned, weights: &[f32], measured: bool) -> Result<(Vec<u8>, Loss), Error> {
    let failed = |source| Error::Quant { name: tensor.name.clone(), source };
    let mut bytes = Vec::new();
    quant::encode(tensor.ty, weights, None, &mut bytes).map_err(failed)?;
    if !measured {
        return Ok((bytes, Loss::default()));
    }
    let mut decoded = vec![0.0; weights.len()];
    quant::decode(tensor.ty, &bytes, &mut decoded).map_err(failed)?;
    Ok((bytes, Loss::of(weights, &decoded)))
}

/// Runs `work` on a pool of `threads` threads, or on the ambient pool if 0.
pub(crate) fn with_threads<T: Send>(
    threads: usize,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    if threads == 0 {
        return work();
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|source| Error::Threads { threads, source })?;
    pool.install(work)
}
