"""Maps: the parts that a calibrator is made of, one file each; `base` derives what others need of them."""
