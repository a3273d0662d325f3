// What the soak knows of every slot, and so what the pipeline may answer: which bytes a load may
// deliver, when it may not miss, when a slot may not be written. It knows nothing of how the
// pipeline works, only what was asked, what was answered, and what the disk was allowed to do.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "pipeline/transfer.hpp"
#include "soak_content.hpp"

namespace kvdisk::test {

// The two figures a soak is judged by, and the first few reasons.
struct Verdict {
    std::uint64_t wrong_bytes = 0;
    std::uint64_t invariant_breaks = 0;

    void break_of(const char* what, std::uint64_t slot = 0) {
        if (++invariant_breaks <= reports_max) report("broken", what, slot);
    }
    void wrong(const char* what, std::uint64_t slot) {
        if (++wrong_bytes <= reports_max) report("WRONG BYTES", what, slot);
    }
    void expect(bool holds, const char* what, std::uint64_t slot = 0) {
        if (!holds) break_of(what, slot);
    }

    // So many faults that more of them would say nothing new.
    bool hopeless() const noexcept { return wrong_bytes + invariant_breaks >= 100; }

    std::uint64_t episode = 0;
    std::int64_t now_ns = 0;

  private:
    static constexpr std::uint64_t reports_max = 10;
    void report(const char* kind, const char* what, std::uint64_t slot) const {
        std::fprintf(stderr, "%s: %s (slot %llu, episode %llu, at %lld ns)\n", kind, what,
                     static_cast<unsigned long long>(slot),
                     static_cast<unsigned long long>(episode), static_cast<long long>(now_ns));
    }
};

// How much harm the disk may do in an episode.
enum class Harm : std::uint8_t {
    none,    // it works
    open,    // it fails, hangs and comes late, but never lies
    silent,  // it lies, too
};

// What a row meant when it was submitted.
struct RowNote {
    std::uint64_t key = 0;
    std::uint64_t generation = 0;  // store: of its content
    std::uint64_t ok_stores = 0;   // of the slot at submit
    std::uint64_t changes = 0;     // of the slot at submit
    std::uint64_t touches = 0;     // of the slot at submit
    bool must_hit = false;         // load: unless the slot changes meanwhile
    bool must_miss = false;        // load: likewise
    bool slot_unused = false;      // nobody else was at the slot at submit
    bool was_quarantined = false;
    bool restored = false;  // the slot may have held what is older than the process
};

class SlotModel {
  public:
    SlotModel(std::uint64_t slot_count, Verdict& verdict) : slots_(slot_count), verdict_(verdict) {}

    std::uint64_t key_of(std::uint64_t slot) const noexcept { return slots_[slot].key; }
    bool quarantined(std::uint64_t slot) const noexcept { return slots_[slot].quarantined; }
    bool in_use(std::uint64_t slot) const noexcept {
        return slots_[slot].stores_open + slots_[slot].loads_open > 0;
    }

    void begin_episode(Harm harm) {
        if (harm_ == Harm::silent) {
            for (Slot& slot : slots_) slot.may_be_damaged = true;
        }
        harm_ = harm;
    }

    RowNote store_submitted(std::uint64_t index, std::uint64_t key) {
        Slot& slot = slots_[index];
        ++slot.changes;
        RowNote note = begin(slot, key);
        note.generation = ++slot.generation_last;
        ++slot.stores_open;
        slot.must_miss = false;
        return note;
    }

    RowNote load_submitted(std::uint64_t index, std::uint64_t key) {
        Slot& slot = slots_[index];
        const bool may_turn_out_corrupt = harm_ == Harm::silent || slot.may_be_damaged;
        // Whichever of two loads finds the damage, the other may find nothing.
        if (may_turn_out_corrupt && slot.loads_open > 0) ++slot.changes;
        RowNote note = begin(slot, key);
        note.must_hit = slot.certain && slot.key == key && slot.stores_open == 0 &&
                        !(may_turn_out_corrupt && slot.loads_open > 0);
        note.must_miss = slot.must_miss && slot.stores_open == 0;
        ++slot.loads_open;
        return note;
    }

    void released(std::uint64_t index) {
        Slot& slot = slots_[index];
        verdict_.expect(slot.quarantined, "a slot is released that was not quarantined", index);
        slot.quarantined = false;
    }

    void store_ended(std::uint64_t index, const RowNote& note, RowResult result) {
        Slot& slot = slots_[index];
        --slot.stores_open;
        ++slot.touches;
        ended(slot, index, note, result);
        verdict_.expect(result.status != RowStatus::miss && result.status != RowStatus::corrupt,
                        "a store ends as a load would", index);
        if (result.status == RowStatus::busy || result.status == RowStatus::refused) return;
        ++slot.changes;
        if (result.status != RowStatus::ok) {
            slot.certain = false;
            slot.may_be_damaged = true;
            // Its write began, so what the slot held before is gone.
            if (result.quarantined && slot.stores_open == 0) slot.must_miss = true;
            return;
        }
        verdict_.expect(!(note.was_quarantined && slot.quarantined),
                        "a store succeeds in a quarantined slot", index);
        slot.key = note.key;
        slot.certain = true;
        slot.restored = false;
        slot.may_be_damaged = harm_ == Harm::silent;
        slot.ok_generations[slot.ok_stores++ % slot.ok_generations.size()] = note.generation;
    }

    // `found` is what the device block holds; `whole` says that it proves itself.
    void load_ended(std::uint64_t index, const RowNote& note, RowResult result, bool whole,
                    const Stamp& found) {
        Slot& slot = slots_[index];
        --slot.loads_open;
        ++slot.touches;
        ended(slot, index, note, result);
        const bool unchanged = slot.changes == note.changes;
        switch (result.status) {
            case RowStatus::ok:
                check_content(slot, index, note, whole, found);
                verdict_.expect(!(note.must_miss && unchanged), "a cleared slot is served", index);
                break;
            case RowStatus::miss:
                verdict_.expect(!(note.must_hit && unchanged), "a stored block is missed", index);
                break;
            case RowStatus::corrupt:
                verdict_.expect(harm_ == Harm::silent || slot.may_be_damaged,
                                "a block is corrupt though the disk never lied", index);
                verdict_.expect(!(note.must_miss && unchanged), "a cleared slot is read", index);
                slot.certain = false;
                slot.may_be_damaged = true;
                ++slot.changes;
                break;
            case RowStatus::refused:
                verdict_.break_of("a load is refused", index);
                break;
            default:
                break;
        }
    }

    // A new process over the same files. `clean`: everything had been written out. `kept`: the
    // epoch is the same, so old records count.
    void restarted(bool clean, bool kept) {
        for (Slot& slot : slots_) {
            slot.stores_open = 0;
            slot.loads_open = 0;
            slot.quarantined = false;
            ++slot.changes;
            ++slot.touches;
            slot.generation_restored = slot.generation_last;
            slot.must_miss = !kept;
            if (!clean || !kept || harm_ == Harm::silent) slot.certain = false;
            // Otherwise a record of the past may be found again, over a payload that is its own or
            // no longer is.
            slot.restored = !slot.certain;
            if (!slot.certain) slot.may_be_damaged = true;
        }
    }

    std::uint64_t quarantined_count() const {
        std::uint64_t count = 0;
        for (const Slot& slot : slots_) count += slot.quarantined ? 1 : 0;
        return count;
    }

  private:
    struct Slot {
        std::uint64_t key = 0;                          // of the last good store
        std::uint64_t generation_last = 0;              // of the last store asked for
        std::uint64_t generation_restored = 0;          // the same, at the last restart
        std::array<std::uint64_t, 8> ok_generations{};  // of the latest good stores, a ring
        std::uint64_t ok_stores = 0;
        std::uint64_t changes = 0;  // whatever may turn a hit into a miss or a miss into a hit
        std::uint64_t touches = 0;  // whatever may make it busy
        std::uint32_t stores_open = 0;
        std::uint32_t loads_open = 0;
        bool quarantined = false;
        bool certain = false;         // the key must be found
        bool must_miss = false;       // nothing may be found
        bool restored = false;        // no good store since the restart: what is there is older
        bool may_be_damaged = false;  // a load may find other bytes than its record says
    };

    RowNote begin(Slot& slot, std::uint64_t key) {
        RowNote note;
        note.slot_unused = slot.stores_open + slot.loads_open == 0 && !slot.quarantined;
        note.key = key;
        note.ok_stores = slot.ok_stores;
        note.changes = slot.changes;
        note.touches = ++slot.touches;
        note.was_quarantined = slot.quarantined;
        note.restored = slot.restored;
        return note;
    }

    void ended(Slot& slot, std::uint64_t index, const RowNote& note, RowResult result) {
        verdict_.expect(result.status != RowStatus::pending, "a row has no result", index);
        verdict_.expect(!(result.status == RowStatus::busy && note.slot_unused &&
                          slot.touches == note.touches + 1),
                        "a slot is busy though nobody uses it", index);
        const bool failed =
            result.status == RowStatus::failed || result.status == RowStatus::copy_failed;
        verdict_.expect(!failed || harm_ != Harm::none, "a row fails though nothing is wrong",
                        index);
        verdict_.expect((result.error != 0) == failed,
                        "an errno comes with a failure and with nothing else", index);
        if (!result.quarantined) return;
        verdict_.expect(result.status != RowStatus::ok, "a good row is quarantined", index);
        slot.quarantined = true;
    }

    void check_content(const Slot& slot, std::uint64_t index, const RowNote& note, bool whole,
                       const Stamp& found) {
        if (!whole) {
            verdict_.wrong("a load delivers bytes that nobody stored", index);
        } else if (found.slot != index || found.key != note.key) {
            verdict_.wrong("a load delivers another slot's or another key's bytes", index);
        } else if (!generation_legal(slot, note, found.generation)) {
            verdict_.wrong("a load delivers bytes of another time", index);
        }
    }

    // A generation that was stored well and not replaced before the load was submitted; or an old
    // one, if none was stored well since the restart.
    static bool generation_legal(const Slot& slot, const RowNote& note, std::uint64_t generation) {
        if (note.restored && generation <= slot.generation_restored) return true;
        const std::uint64_t oldest = note.ok_stores == 0 ? 0 : note.ok_stores - 1;
        for (std::uint64_t store = oldest; store < slot.ok_stores; ++store) {
            if (slot.ok_stores - store <= slot.ok_generations.size() &&
                slot.ok_generations[store % slot.ok_generations.size()] == generation) {
                return true;
            }
        }
        return false;
    }

    std::vector<Slot> slots_;
    Verdict& verdict_;
    Harm harm_ = Harm::none;
};

}  // namespace kvdisk::test
