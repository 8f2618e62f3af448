"""python -m cactus"""

from cactus import threads

threads.settle()

from cactus.cli import main  # noqa: E402 (torch must not be imported before the thread settings)

main()
