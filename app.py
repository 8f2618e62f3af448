"""The page: python app.py [--port 7860] [--verifier … --draft …]. Without arguments it offers the embedded pair, and Qwen 3 on CUDA."""

from cactus import threads

threads.settle()

from cactus.page.launch import main  # noqa: E402 (torch must not be imported before the thread settings)

if __name__ == "__main__":
    main()
