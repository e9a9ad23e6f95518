"""The data sets: each reads its own files; `fednorm.data.DATASETS` names them."""
