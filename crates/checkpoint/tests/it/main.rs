//! Checkpoints on disk as a user may have them: sound, damaged, made to do harm.

mod support;

mod damaged_files;
mod fitting;
mod folders;
mod sharded;
mod written_by_others;
