from dropmatch.cli import main

if __name__ == "__main__":  # processes that are spawned import this file too
    main()
