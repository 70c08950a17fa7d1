//! Rows on their way from one GPU to the next.

use cudarc::driver::DriverError;
use model::PassId;

use crate::Cuda;
use crate::driver::{Buffer, Event};
use crate::fail;

/// Rows that may be on their way at once: while one pass is fetched the next one can be put down.
const BOXES: usize = 2;

/// Where a GPU puts the rows of a pass down for the next one, in its own memory. The next one fetches them by itself, in
/// its own queue; the host waits for nothing.
pub(crate) struct Link {
    /// The one used last is last.
    boxes: Vec<Mailbox>,
}

struct Mailbox {
    /// [most rows of a pass, hidden] f32.
    rows: Buffer,
    /// The end of the last fetch.
    emptied: Option<Event>,
}

impl Link {
    /// Between two parts of a model, for passes of at most `rows` rows.
    pub(crate) fn new(from: &Cuda, to: &Cuda, rows: usize) -> Result<Link, DriverError> {
        to.device.reach(&from.device)?;
        from.device.reach(&to.device)?;
        let bytes = Link::bytes(rows, from.model.spec.hidden);
        let make = |_| Ok(Mailbox { rows: from.device.allocate(bytes)?, emptied: None });
        Ok(Link { boxes: (0..BOXES).map(make).collect::<Result<_, DriverError>>()? })
    }

    /// Bytes that a link takes of the first GPU's memory.
    pub(crate) fn room(rows: usize, hidden: usize) -> usize {
        BOXES * Link::bytes(rows, hidden)
    }

    fn bytes(rows: usize, hidden: usize) -> usize {
        4 * rows * hidden
    }

    /// Hands the hidden rows of a pass over, as the first part has left them.
    pub(crate) fn hand_over(&mut self, from: &mut Cuda, to: &mut Cuda, pass: PassId) -> model::Result<()> {
        from.settle(pass, "hand over")?;
        let mut mailbox = self.boxes.remove(0);
        let done = mailbox.carry(from, to, pass);
        self.boxes.push(mailbox);
        done
    }
}

impl Mailbox {
    fn carry(&mut self, from: &mut Cuda, to: &mut Cuda, pass: PassId) -> model::Result<()> {
        let fail = fail("hand over", from.model.spec.layers.len());
        let open = from.get(pass)?;
        let bytes = Link::bytes(open.pass.rows(), from.model.spec.hidden);
        let (source, target) = (open.buffers.hidden.at(), to.get(pass)?.buffers.hidden.at());
        if let Some(emptied) = self.emptied.take() {
            emptied.hold(from.device.stream).map_err(&fail)?;
        }
        from.device.copy(source, self.rows.at, bytes).map_err(&fail)?;
        let filled = Event::record(&from.device).map_err(&fail)?;
        to.device.bind().map_err(&fail)?;
        filled.hold(to.device.stream).map_err(&fail)?;
        to.device.copy_from(&from.device, self.rows.at, target, bytes).map_err(&fail)?;
        self.emptied = Some(Event::record(&to.device).map_err(&fail)?);
        Ok(())
    }
}
