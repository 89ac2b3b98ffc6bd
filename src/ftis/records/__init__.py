"""The records that a run leaves behind, with one writer and one reader."""
