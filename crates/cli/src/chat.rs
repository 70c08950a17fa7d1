//! `redlite chat`: a conversation at the terminal, or down a pipe.

pub mod args;
mod command;
mod conversation;
mod input;
mod talk;

use crate::failure::{Failure, Outcome};
use crate::{interrupt, report};
use args::ChatArgs;
use command::Command;
use conversation::Conversation;
use input::Input;
use talk::{Said, Talk};

/// Runs the command.
pub fn run(args: &ChatArgs) -> Result<Outcome, Failure> {
    let mut conversation = Conversation::new(args.system.clone());
    if let Some(path) = &args.load {
        conversation.load(path)?;
    }
    let mut input = Input::new(!args.no_history)?;
    let stop = interrupt::Stop::listen(input.is_terminal())?;
    let mut talk = Talk::new(args)?;
    if input.is_terminal() && !args.quiet {
        report::say("/help lists the commands");
    }
    while let Some(entry) = input.next()? {
        let meant = if entry.block { Ok(Command::Say(&entry.text)) } else { command::parse(&entry.text) };
        let done = match meant {
            Err(unclear) => Err(Failure::Usage(unclear)),
            Ok(Command::Quit) => break,
            Ok(Command::Say(message)) => {
                stop.during(|cancel| ask(&mut talk, &mut conversation, message, cancel))
            }
            Ok(other) => obey(other, &talk, &mut conversation),
        };
        match done {
            Ok(()) => {}
            // An output that nobody reads any more ends the conversation; a mistake does not.
            Err(Failure::Output(error)) => return Err(Failure::Output(error)),
            Err(failure) => report::say(format_args!("redlite: {failure}")),
        }
    }
    Ok(Outcome::Success)
}

/// Says `message`, and writes the answer.
fn ask(
    talk: &mut Talk,
    conversation: &mut Conversation,
    message: &str,
    cancel: &engine::Cancel,
) -> Result<(), Failure> {
    conversation.say(message);
    match talk.answer(conversation.messages(), cancel) {
        Ok(Said::Answer(answer)) => {
            conversation.hear(&answer.content, &answer.reasoning);
            talk.cut().into_iter().for_each(report::say);
            Ok(())
        }
        Ok(Said::Unread) => {
            conversation.take_back();
            report::say("stopped; the message is not part of the conversation");
            Ok(())
        }
        Err(failure) => {
            conversation.take_back();
            Err(failure)
        }
    }
}

/// Does what a command other than a message or the end says.
fn obey(command: Command, talk: &Talk, conversation: &mut Conversation) -> Result<(), Failure> {
    match command {
        Command::Help => report::say(command::HELP),
        Command::Stats => report::say(talk.stats()),
        Command::Reset => {
            conversation.reset();
            report::say("a new conversation");
        }
        Command::File(path) => {
            let size = report::size(conversation.attach(path)? as u64);
            report::say(format_args!("{}: {size}, goes with the next message", path.display()));
        }
        Command::Save(path) => {
            conversation.save(path)?;
            report::say(format_args!("{}: {} messages", path.display(), conversation.messages().len()));
        }
        Command::Load(path) => {
            let messages = conversation.load(path)?;
            report::say(format_args!("{}: {messages} messages", path.display()));
        }
        Command::Say(_) | Command::Quit | Command::Nothing => {}
    }
    Ok(())
}
