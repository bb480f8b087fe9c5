-- Shared by admit.lua and settle.lua: reads and writes what a holder of limits has used. The Python twin is rules.py.
-- A holder is a hash with these fields: when its buckets of requests (r) and tokens (t) are full again, the seconds that were
-- returned to each (rb, tb), the current day (d) with its tokens and cost (dt, dc, dn), another day (od, odt, odc, odn), and the
-- same of the months (m, mt, mc, mn, om, omt, omc, omn). Gateways of other versions read these fields: never change what one means.
-- A cost is stored twice: in nano-units (dn), which are exact, and in units of the currency (dc), as earlier versions do.
-- If dc is not what belongs to dn, a gateway of an earlier version has counted last, and dc is used.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local FIELDS = {
  'r', 't', 'rb', 'tb',
  'd', 'dt', 'dc', 'dn', 'od', 'odt', 'odc', 'odn',
  'm', 'mt', 'mc', 'mn', 'om', 'omt', 'omc', 'omn',
}
local PERIODS, NANO = {'d', 'od', 'm', 'om'}, 1000000000

local function read_holder(key)
  local values, holder = redis.call('HMGET', key, unpack(FIELDS)), {}
  for i, name in ipairs(FIELDS) do holder[name] = tonumber(values[i] or 0) end
  for _, p in ipairs(PERIODS) do
    local cost = holder[p .. 'c']
    if cost ~= holder[p .. 'n'] / NANO then holder[p .. 'n'] = math.floor(cost * NANO + 0.5) end
  end
  return holder
end

-- Seconds after which the hash means nothing any more.
local function lifetime(holder)
  if holder.m ~= 0 then return 70 * 86400 end
  if holder.d ~= 0 then return 3 * 86400 end
  return math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 120
end

local function write_holder(key, holder)
  local values = {}
  for _, p in ipairs(PERIODS) do holder[p .. 'c'] = holder[p .. 'n'] / NANO end
  for i, name in ipairs(FIELDS) do
    -- Days and months are written only if the holder has limits on them.
    if i <= 4 or (i <= 12 and holder.d ~= 0) or (i > 12 and holder.m ~= 0) then
      values[#values + 1] = name
      values[#values + 1] = string.format('%.17g', holder[name])
    end
  end
  redis.call('HSET', key, unpack(values))
  redis.call('EXPIRE', key, lifetime(holder))
end

-- Take seconds from a bucket: rules._settle_bucket, and the buckets in rules.admit.
local function take_from_bucket(holder, bucket, seconds)
  if seconds > 0 then holder[bucket] = math.max(holder[bucket], now) + seconds end
end
