//! Models of the shipped protocol.
