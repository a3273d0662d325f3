// A backend's own duplicates of the descriptors it was given. Work that outlives the caller's files
// (an abandoned write, a request that a kernel worker resolves late) can then never hit an
// unrelated file that was opened under a reused number. A lock held through the open file lives as
// long as such work.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <system_error>
#include <vector>

namespace kvdisk::io {

class OwnedFiles {
  public:
    // A descriptor that is not open becomes -1: requests on it answer -EBADF. Throws
    // std::system_error when there is no room for duplicates.
    explicit OwnedFiles(std::span<const int> files) {
        descriptors_.reserve(files.size());
        for (const int file : files) {
            descriptors_.push_back(::fcntl(file, F_DUPFD_CLOEXEC, 3));
            if (descriptors_.back() < 0 && errno != EBADF) {
                const int error = errno;
                close_all();
                throw std::system_error(error, std::system_category(),
                                        "cannot duplicate the files' descriptors");
            }
        }
    }

    OwnedFiles(const OwnedFiles&) = delete;
    OwnedFiles& operator=(const OwnedFiles&) = delete;

    ~OwnedFiles() { close_all(); }

    // Leaves every descriptor open for the life of the process.
    void leak() noexcept { descriptors_.clear(); }

    const std::vector<int>& descriptors() const noexcept { return descriptors_; }
    std::size_t size() const noexcept { return descriptors_.size(); }

  private:
    void close_all() noexcept {
        for (const int descriptor : descriptors_) {
            if (descriptor >= 0) ::close(descriptor);
        }
    }

    std::vector<int> descriptors_;
};

}  // namespace kvdisk::io
