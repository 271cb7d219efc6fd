//! Checkpoint folders as one name-to-tensor view
