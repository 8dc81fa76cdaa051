from rlflame.display import PlainDisplay, say


class LiveDisplay(PlainDisplay):
    def __init__(self) -> None:
        super().__init__(say)
