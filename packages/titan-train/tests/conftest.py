from titan_testing import preload

preload("titan_train.train")
