from .step import Step


class LatentAttentionStep(Step):
    def __init__(self, executable, op):
        raise NotImplementedError
