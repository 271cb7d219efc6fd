//! Text encoders, denoisers, autoencoders and the family table
