//! The loop that owns requests
