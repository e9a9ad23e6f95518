"""One file per data set; `fednorm.data.DATASETS` is their registry."""
