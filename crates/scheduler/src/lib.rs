//! Pure scheduling policies
